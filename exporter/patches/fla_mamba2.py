"""Mamba-2 of ``fla.layers`` without a GPU, in chunks -> ``LinearAttention``, update rule gated.

    torch_forward(x) = W_out norm(scan(conv(W_in x)), gate)

The layer's own PyTorch is what is compared with. It cuts what it pads where the example needs
padding, so that a trace holds for those lengths alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels.mamba import mamba_split_conv1d_scan_combined
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject


def torch_forward(
    self: LibraryObject,
    input_states: Tensor,
    last_state: object = None,
    use_cache: bool = False,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None, None]:
    """Stand in for ``Mamba2.torch_forward``."""
    if last_state is not None or use_cache or attention_mask is not None:
        raise UnsupportedModelError(
            "Mamba2 of fla is given a state or a mask. Give it whole sequences without padding: "
            "the artifact carries its states itself."
        )
    by_channel = self.D.shape[0] != self.num_heads
    output: Tensor = mamba_split_conv1d_scan_combined(
        self.in_proj(input_states),
        self.conv1d.weight[:, 0],
        self.conv1d.bias,
        self.dt_bias,
        -torch.exp(self.A_log.float()),
        self.D.view(self.num_heads, -1) if by_channel else self.D,
        dt_limit=self.dt_limit,
        activation=self.activation,
        rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
        rmsnorm_eps=self.norm.eps if self.rmsnorm else 1e-6,
        outproj_weight=self.out_proj.weight,
        outproj_bias=self.out_proj.bias,
        headdim=None if by_channel else self.head_dim,
        ngroups=self.n_groups,
        norm_before_gate=self.norm_before_gate,
    )
    return output, None, None


FUNCTIONS = (
    Function(
        "fla.layers.mamba2",
        "Mamba2.torch_forward",
        torch_forward,
        "flash-linear-attention 0.6.0",
    ),
)
