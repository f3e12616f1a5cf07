"""Layers of packages that are not installed, with the parameters that those of the packages have.

    mamba_ssm  Mamba, Mamba2, RMSNorm, RMSNormGated, LayerNorm
    fla        RMSNorm, LayerNorm, FusedRMSNormGated, ShortConvolution

Names and shapes of weights are the libraries', so that trained ones load. They call linexport's
kernels, as the libraries' layers do theirs, and compute a whole sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import functions
from linexport.system.untyped import TorchCallable


def _kernel(name: str, package: str = "mamba_ssm") -> TorchCallable:
    """Return the function that stands in for a kernel."""
    return functions(package)[name]


class RMSNorm(nn.Module):
    """``mamba_ssm.ops.triton.layer_norm.RMSNorm`` and ``fla.modules.RMSNorm``."""

    def __init__(self, hidden_size: int, *args: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        # The package's second argument is eps, fla's says whether there is a weight.
        first = args[0] if args else kwargs.get("elementwise_affine", True)
        self.eps = first if isinstance(first, float) else eps
        self.weight = nn.Parameter(torch.ones(hidden_size)) if first is not False else None
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if kwargs.get("bias") else None

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return _kernel("rms_norm", "fla")(x, self.weight, self.bias, residual, self.eps, prenorm)


class LayerNorm(RMSNorm):
    """``fla.modules.LayerNorm``."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        return _kernel("layer_norm", "fla")(x, self.weight, self.bias, residual, self.eps, prenorm)


class RMSNormGated(nn.Module):
    """``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return _kernel("rmsnorm_fn")(
            x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate
        )


class FusedRMSNormGated(nn.Module):
    """``fla.modules.FusedRMSNormGated``."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, g: Tensor, residual: Tensor | None = None) -> Any:
        return _kernel("rms_norm_gated", "fla")(
            x, g, self.weight, None, self.activation, residual, eps=self.eps
        )


class FlaShortConvolution(nn.Conv1d):
    """``fla.modules.ShortConvolution``."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        **_: Any,
    ) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
        )
        self.activation = activation

    def forward(self, x: Tensor, **given: Any) -> Any:  # type: ignore[override]
        known = {name: value for name, value in given.items() if value is not None and value}
        last = bool(known.pop("output_final_state", False))
        if known:
            raise UnsupportedModelError(
                f"ShortConvolution is called with {', '.join(known)}. Install "
                "flash-linear-attention, or give it whole sequences alone."
            )
        return _kernel("causal_conv1d", "fla")(
            x,
            self.weight,
            self.bias,
            output_final_state=last,
            activation=self.activation,
        )


class Mamba(nn.Module):
    """``mamba_ssm.Mamba``."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        inner = int(expand * d_model)
        rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias)
        self.conv1d = nn.Conv1d(
            inner, inner, d_conv, groups=inner, padding=d_conv - 1, bias=conv_bias
        )
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        _begin(self.dt_proj, rank, dt_min, dt_max, dt_scale, dt_init_floor, dt_init)
        rates = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(inner, 1)
        self.A_log, self.D = nn.Parameter(rates.log()), nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=bias)

    def forward(self, hidden_states: Tensor, inference_params: object = None) -> Tensor:
        _refuse_states("Mamba", inference_params)
        return _kernel("mamba_inner_fn")(
            self.in_proj(hidden_states).transpose(1, 2),
            self.conv1d.weight,
            self.conv1d.bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self.out_proj.weight,
            self.out_proj.bias,
            -torch.exp(self.A_log.float()),
            D=self.D.float(),
            delta_bias=self.dt_proj.bias.float(),
        )


class Mamba2(nn.Module):
    """``mamba_ssm.Mamba2``."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        inner = int(expand * d_model)
        width = inner if d_ssm is None else d_ssm
        heads, mixed = width // headdim, width + 2 * ngroups * d_state
        self.headdim, self.ngroups, self.dt_limit = headdim, ngroups, dt_limit
        self.in_proj = nn.Linear(d_model, 2 * inner + 2 * ngroups * d_state + heads, bias=bias)
        self.conv1d = nn.Conv1d(
            mixed, mixed, d_conv, groups=mixed, padding=d_conv - 1, bias=conv_bias
        )
        self.dt_bias = nn.Parameter(_first_steps(heads, dt_min, dt_max, dt_init_floor))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*A_init_range).log())
        self.D = nn.Parameter(torch.ones(width if D_has_hdim else heads))
        self.norm = (
            RMSNormGated(width, 1e-5, width // ngroups, norm_before_gate) if rmsnorm else None
        )
        self.out_proj = nn.Linear(inner, d_model, bias=bias)

    def forward(
        self, u: Tensor, seqlen: None = None, seq_idx: None = None, **given: object
    ) -> Tensor:
        others = {"seqlen": seqlen, "seq_idx": seq_idx, **given}
        _refuse_states("Mamba2", next((x for x in others.values() if x is not None), None))
        by_channel = self.D.shape[0] != self.A_log.shape[0]
        found: Tensor = _kernel("mamba_split_conv1d_scan_combined")(
            self.in_proj(u),
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            self.dt_bias,
            -torch.exp(self.A_log.float()),
            self.D.view(-1, self.headdim) if by_channel else self.D,
            dt_limit=self.dt_limit,
            rmsnorm_weight=None if self.norm is None else self.norm.weight,
            rmsnorm_eps=1e-6 if self.norm is None else self.norm.eps,
            outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias,
            headdim=None if by_channel else self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=self.norm is not None and self.norm.norm_before_gate,
        )
        return found


def _refuse_states(name: str, given: object) -> None:
    if given is not None:
        raise UnsupportedModelError(
            f"{name} is called with states or with packed sequences. Call it with whole sequences "
            "alone: the artifact carries its states itself."
        )


def _begin(
    layer: nn.Linear,
    rank: int,
    low: float,
    high: float,
    scale: float,
    floor: float,
    kind: str,
) -> None:
    """Give a layer of steps the weights that the library begins with."""
    size = rank**-0.5 * scale
    if kind == "constant":
        nn.init.constant_(layer.weight, size)
    else:
        nn.init.uniform_(layer.weight, -size, size)
    with torch.no_grad():
        layer.bias.copy_(_first_steps(layer.out_features, low, high, floor))


def _first_steps(count: int, low: float, high: float, floor: float) -> Tensor:
    """Return biases whose softplus is between two numbers, evenly by their logarithms."""
    steps = torch.exp(torch.rand(count) * (math.log(high) - math.log(low)) + math.log(low))
    steps = steps.clamp(min=floor)
    return steps + torch.log(-torch.expm1(-steps))


LAYERS: dict[str, dict[str, type[nn.Module]]] = {
    "mamba_ssm": {"Mamba": Mamba, "Mamba2": Mamba2, "RMSNorm": RMSNorm},
    "fla": {
        "RMSNorm": RMSNorm,
        "LayerNorm": LayerNorm,
        "FusedRMSNormGated": FusedRMSNormGated,
        "FusedRMSNormSwishGate": FusedRMSNormGated,
        "ShortConvolution": FlaShortConvolution,
    },
}
"""Classes of a package, in each of its modules."""

IN_MODULE = {"mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated}}
"""Classes of a module that have the name of others of the package."""
