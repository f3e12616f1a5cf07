"""The stabilised mLSTM of the packages xlstm and mlstm_kernels -> the ops that ``mlstm`` writes.

Parallel, chunkwise and recurrent forms of one function: they differ in where eps is added, by less
than eps of the denominator, and in the maximum that their last states are divided by.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.mlstm import cell
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject

NO_STATES = (None, None, None)
"""In the place of last states: an artifact has states of its own."""


def _parallel(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    igate_preact: Tensor,
    fgate_preact: Tensor,
    lower_triangular_matrix: Tensor | None = None,
    stabilize_rowwise: bool = True,
    eps: float = 1e-6,
    **_: object,
) -> Tensor:
    """Stands in for ``parallel_stabilized_simple`` of xlstm, whose gates are (B, H, T, 1)."""
    if not stabilize_rowwise:
        raise UnsupportedModelError(
            "parallel_stabilized_simple with stabilize_rowwise=False subtracts a maximum over all "
            "tokens, later ones among them. Leave it True."
        )
    return cell(queries, keys, values, igate_preact.squeeze(-1), fgate_preact.squeeze(-1), eps)


def _chunkwise(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    igate_preact: Tensor,
    fgate_preact: Tensor,
    initial_C: Tensor | None = None,
    initial_n: Tensor | None = None,
    initial_m: Tensor | None = None,
    chunk_size: int = 64,
    return_last_state: bool = False,
    eps: float = 1e-6,
    **_: object,
) -> object:
    """Stands in for ``chunkwise_simple`` of xlstm."""
    given = (queries, keys, values, igate_preact, fgate_preact)
    return _kernel(*given, initial_C, return_last_states=return_last_state, eps=eps)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    **_: object,
) -> Any:
    """Stands in for kernels of ``mlstm_kernels``."""
    _from_zero(c_initial)
    found = cell(q, k, v, i, f, eps)
    return (found, NO_STATES) if return_last_states else found


def _backend(
    self: LibraryObject,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> object:
    """Stands in for ``mLSTMBackend.forward``, whose kernels are inside of partial functions."""
    config = self.config
    kept = config.return_last_states if return_last_states is None else return_last_states
    if "siging" in config.chunkwise_kernel:
        return self._train_fn(
            q=q, k=k, v=v, i=i, f=f, return_last_states=kept, normalize=config.normalize_siging
        )
    kept = kept or "inference" in (mode or config.mode)
    return _kernel(q, k, v, i, f, c_initial, return_last_states=kept, eps=config.eps)


def _from_zero(state: Tensor | None) -> None:
    if state is not None:
        raise UnsupportedModelError(
            "An mLSTM is given its first state. Leave it out: the artifact has a state of its own, "
            "which begins at zero."
        )


_BACKENDS, _XLSTM = "xlstm.blocks.mlstm.backends", "xlstm 2.0.6"
_TORCH, _KERNELS = "mlstm_kernels.torch", "mlstm_kernels 2.0.6"

FUNCTIONS = (
    Function(_BACKENDS, "parallel_stabilized_simple", _parallel, _XLSTM),
    Function(_BACKENDS, "chunkwise_simple", _chunkwise, _XLSTM),
    Function(f"{_TORCH}.backend_module", "mLSTMBackend.forward", _backend, _KERNELS),
    *(
        Function(f"{_TORCH}.{module}", name, _kernel, _KERNELS)
        for module, name in (
            ("parallel.native.fwbw", "mlstm_parallel__native_autograd"),
            ("parallel.native.fwbw", "mlstm_parallel__native_custbw"),
            ("parallel.native_stablef.fwbw", "mlstm_parallel__native_stablef_autograd"),
            ("parallel.native_stablef.fwbw", "mlstm_parallel__native_stablef_custbw"),
            ("chunkwise.native.fwbw", "mlstm_chunkwise__native_autograd"),
            ("chunkwise.native.fwbw", "mlstm_chunkwise__native_custbw"),
            ("recurrent.native_sequence", "mlstm_recurrent_sequence__native_fw"),
        )
    ),
)
