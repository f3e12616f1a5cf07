"""Arrays of other libraries on a GPU, by DLPack: NumPy's, which say that they are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linexport.errors import UsageError
from linexport.targets.runtime import dlpack
from linexport.targets.runtime.device_array import DeviceArray, is_on_device


class OnGpu:
    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0

    def __dlpack__(self, stream: int) -> Any:
        assert stream == dlpack.LEGACY_STREAM
        return self.x.__dlpack__()


def device(index: int = 0) -> Any:
    waited: list[int] = []
    return SimpleNamespace(index=index, kind=dlpack.CUDA, wait_for=waited.append, waited=waited)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, np.bool_])
def test_memory_is_taken_as_it_is_and_kept(dtype: Any) -> None:
    x, on = np.ones((4, 3, 2), dtype)[1:], device()
    base = x.ctypes.data
    given = OnGpu(x)
    assert is_on_device(given, dlpack.CUDA) and not is_on_device(x, dlpack.CUDA)
    found = DeviceArray.wrap(on, given)
    assert (found.address, found.shape, found.dtype) == (base, (3, 3, 2), np.dtype(dtype))
    assert on.waited == [dlpack.LEGACY_STREAM]
    del x, given
    # What was freed would be given to the next array of this size.
    assert all(np.empty((4, 3, 2), dtype).ctypes.data != base for _ in range(9))


def test_what_is_not_one_piece_on_this_gpu_is_refused() -> None:
    for x, on, said in (
        (np.ones((4, 3), np.float32).T, device(), r"of shape \(3, 4\) with strides \(4, 12\)"),
        (np.ones(3, np.complex64), device(), "element type 5 with 64 bits"),
        (np.ones(3, np.float32), device(1), "on GPU 0; expected GPU 1"),
    ):
        with pytest.raises(UsageError, match=said):
            DeviceArray.wrap(on, OnGpu(x))
