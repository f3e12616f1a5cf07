"""Mamba-3 of flash-linear-attention, whose kernels are mamba-ssm's, in Triton's interpreter.

Three things are changed. Cosines, sines and hyperbolic tangents are exact: the kernels take a GPU's
approximations. Inputs stay float32, which mamba-ssm casts to bfloat16 first. And the layer takes
tensors that are on no GPU. The kernels of several ranks (MIMO) do not run so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _cos(x):  # type: ignore[no-untyped-def]
    return tl.cos(x)


@triton.jit
def _sin(x):  # type: ignore[no-untyped-def]
    return tl.sin(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


def replace() -> None:
    """Change the library, before its layer is imported."""
    # The package itself imports what is compiled for a GPU.
    package, spec = ModuleType("mamba_ssm"), importlib.util.find_spec("mamba_ssm")
    assert spec is not None
    package.__path__ = spec.submodule_search_locations or []
    sys.modules["mamba_ssm"] = package
    kernels = "mamba_ssm.ops.triton.mamba3"
    used = importlib.import_module(f"{kernels}.utils")
    used.cos_approx, used.sin_approx, used.tanh_approx = _cos, _sin, _tanh
    function = importlib.import_module(f"{kernels}.mamba3_siso_combined")._Mamba3Function
    layers = importlib.import_module("fla.layers.mamba3")

    def in_float32(
        *, Input_States: None, cu_seqlens: Tensor | None, chunk_size: int, **given: Any
    ) -> Any:
        names = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
        tensors = (given[name] for name in names)
        return function.apply(*tensors, *[None] * 4, cu_seqlens, chunk_size, False)

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Any:
        batch, length, _ = hidden_states.shape
        packed = layers.unpad_hidden_states(hidden_states, None, attention_mask, length)
        tokens, places, bounds = packed
        y, _ = self.cuda_kernels_forward(tokens, cu_seqlens=bounds)
        return layers.repad_hidden_states(y, places, batch, length), None, None

    layers.mamba3_siso_combined, layers.Mamba3.forward = in_float32, forward
