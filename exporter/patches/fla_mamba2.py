"""Mamba-2 of ``fla.layers`` without a GPU, in chunks -> ``LinearAttention``, update rule gated.

    torch_forward(x) = W_out norm(scan(mask conv(mask W_in x)), gate)

The layer's own PyTorch is what is compared with. It cuts what it pads where the example needs
padding, so that a trace holds for those lengths alone. Its mask zeroes what padding writes; the
state decays over padding as over tokens.

Keys and queries of groups are those of neighbouring heads, as the library's kernels have them:

    kernels          head h has group h // (heads / groups)
    torch_forward    head h has group h mod groups

They differ where there are several groups of several heads, and nothing runs the kernels here: such
a layer is refused.
"""

from __future__ import annotations

from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels.convolutions import convolved
from linexport.patches.gpu_kernels.mamba import mamba_chunk_scan_combined
from linexport.patches.gpu_kernels.norms import layernorm_fn
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
    if last_state is not None or use_cache:
        raise UnsupportedModelError(
            "Mamba2 of fla is given a state. Give it whole sequences: the artifact carries its "
            "states itself."
        )
    if 1 < self.n_groups < self.num_heads:
        raise UnsupportedModelError(
            f"Mamba2 of fla has {self.n_groups} groups for {self.num_heads} heads (n_groups, "
            "num_heads): on a CPU its code gives neighbouring heads different groups, and on a GPU "
            "its kernels give them the same one, so that there is no original here to compare an "
            "artifact with. Save the model as a folder of the type mamba2, which the code of "
            "transformers computes as those kernels do, and convert that."
        )
    return forward(self, input_states, attention_mask), None, None


def forward(self: LibraryObject, input_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the output of a layer, (B, T, width of the model), as the kernels compute it.

    Args:
        self: the layer.
        input_states: (B, T, width of the model).
        attention_mask: (B, T), 1 for tokens and 0 for padding; None for none.
    """
    width, heads, groups = self.intermediate_size, self.num_heads, self.n_groups
    keys, is_silu = groups * self.ssm_state_size, self.activation in ("silu", "swish")
    projected = self.in_proj(input_states)
    rest = projected.shape[-1] - width - self.conv_dim - heads
    _, gate, xBC, dt = projected.split([rest, width, self.conv_dim, heads], -1)
    xBC, _ = convolved(
        _without_padding(xBC, attention_mask).transpose(1, 2),
        self.conv1d.weight,
        self.conv1d.bias,
        self.activation if is_silu else None,
    )
    xBC = xBC.transpose(1, 2) if is_silu else self.act(xBC.transpose(1, 2))
    x, B, C = _without_padding(xBC, attention_mask).split([width, keys, keys], -1)
    D = self.D.view(heads, -1) if self.D.shape[0] != heads else self.D
    y: Tensor = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, -1)),
        dt,
        -self.A_log.float().exp(),
        B.unflatten(-1, (groups, -1)),
        C.unflatten(-1, (groups, -1)),
        D=D,
        dt_bias=self.dt_bias,
        dt_softplus=True,
        dt_limit=self.dt_limit,
    ).flatten(2)
    if self.rmsnorm:
        norm = self.norm
        y = layernorm_fn(
            y, norm.weight, None, gate, norm.eps, width // groups, self.norm_before_gate, True
        )
    else:
        y = y * self.act(gate)
    found: Tensor = self.out_proj(y)
    return found


def _without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, T, C) with zeros at padding; as the layer, x where the mask has other sizes."""
    if mask is None or mask.shape != x.shape[:2]:
        return x
    return x * mask[..., None].to(x.dtype)


FUNCTIONS = (
    Function(
        "fla.layers.mamba2",
        "Mamba2.torch_forward",
        torch_forward,
        "flash-linear-attention 0.6.0",
    ),
)
