"""States in the memory of an execution provider's device, bound to ONNX Runtime's calls by address.

    past state in that memory   ->  present state in that memory, in a block that nobody holds
    one that grows              ->  the same, in memory that ONNX Runtime's arena gives
    inputs of the host          ->  copied there by ONNX Runtime
    other outputs               ->  in the host's memory

The states of a sequence so alternate between two places, and a step moves its tokens and its
logits. Calls that are alike may be CUDA graphs; see ``ort_graphs``. On a provider that computes in
the host's memory, all of this is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from linexport.system.time_limit import watched
from linexport.system.untyped import ArrayLike
from linexport.targets.runtime import dlpack
from linexport.targets.runtime.cuda_graphs import OrtGraphs
from linexport.targets.runtime.device_array import DeviceArray
from linexport.targets.runtime.memory_pool import Blocks
from linexport.targets.runtime.options import giving_memory_back
from linexport.targets.runtime.placement import STATE

PAST = "past_"
"""Beginning of the names of inputs that are states."""

NVIDIA = 0x10DE
"""Number of the vendor, as PCI and ONNX Runtime have it."""


class OrtMemory:
    """Memory of a session's device; see ``device_array.Memory``.

    Args:
        inner: an ``onnxruntime.InferenceSession``.
        captures: whether it was opened to capture calls as CUDA graphs.
        gives_back: each call gives the memory of its values on the host back at its end.

    Attributes:
        name: ONNX Runtime's name of the device: ``cuda``; of any other than NVIDIA's ``cpu``: the
            states are then in the host's memory.
        index: of the device.
        kind: DLPack's number of such devices.
    """

    def __init__(self, inner: Any, captures: bool = False, gives_back: bool = False) -> None:
        infos = inner.get_output_memory_infos()
        found = next((i for i in infos if i.device_vendor_id == NVIDIA), None)
        self.name, self.kind, self.index = "cpu", dlpack.CPU, 0
        if found is not None:
            self.name, self.kind, self.index = "cuda", dlpack.CUDA, found.device_id
        self._inner, self._gives_back = inner, gives_back
        self._held: dict[int, ArrayLike] = {}
        self._blocks = Blocks(self._take, lambda address: self._held.pop(address), self.wait)
        shapes = {i.name: i.shape for i in inner.get_inputs()}
        outputs = {o.name: o.shape for o in inner.get_outputs()}
        self._pasts = {n: PAST + n.removeprefix(STATE) for n in outputs if n.startswith(STATE)}
        self._fixed = {n for n, past in self._pasts.items() if shapes.get(past) == outputs[n]}
        self._outputs = list(outputs)
        self._graphs = OrtGraphs(inner, self.name, self.index) if captures else None
        self._turn: AbstractContextManager[Any] = threading.Lock() if captures else nullcontext()

    def run(
        self, inputs: Mapping[str, ArrayLike], arrays: Mapping[str, ArrayLike]
    ) -> dict[str, ArrayLike]:
        """Run the model with some outputs written to arrays that are there; return the others.

        A state is returned where its past was.
        """
        pasts = {name: inputs.get(past) for name, past in self._pasts.items() if name not in arrays}
        stay = {name: past for name, past in pasts.items() if isinstance(past, DeviceArray)}
        following = {
            name: DeviceArray(self, past.shape, past.dtype)
            for name, past in stay.items()
            if name in self._fixed
        }
        given = {**following, **arrays}
        launch = partial(self._launch, inputs, given, stay)
        alike = self._graphs is not None and {*given} == {*self._pasts}
        with self._turn:
            if self._graphs and alike and all(isinstance(x, DeviceArray) for x in given.values()):
                found = self._graphs.run(inputs, given, launch)
            else:
                found = launch()
        return {**following, **found}

    def _launch(
        self,
        inputs: Mapping[str, ArrayLike],
        given: Mapping[str, ArrayLike],
        stay: Mapping[str, ArrayLike],
    ) -> dict[str, ArrayLike]:
        """Run the model with outputs written to ``given``; return the others, ``stay`` in place."""
        others = [name for name in self._outputs if name not in given]
        binding = self._inner.io_binding()
        for name, values in inputs.items():
            if isinstance(values, DeviceArray):
                binding.bind_input(name, *self._place(values))
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(values))
        for name, array in given.items():
            binding.bind_output(name, *self._place(array))
        for name in others:
            binding.bind_output(name, *((self.name, self.index) if name in stay else ("cpu", 0)))
        own = giving_memory_back() if self._gives_back else None
        with watched(self._graphs.launched if self._graphs else own) as options:
            self._inner.run_with_iobinding(binding, options)
        made = dict(zip(others, binding.get_outputs()[len(given) :], strict=True))
        return {n: self._array(v) if n in stay else v.numpy() for n, v in made.items()}

    def hold(self, arrays: Mapping[str, object]) -> dict[str, ArrayLike]:
        """Return arrays on the device; those that are there stay as they are."""
        return {
            name: x if isinstance(x, DeviceArray) else DeviceArray.of(self, x)
            for name, x in arrays.items()
        }

    def empty(self, shape: tuple[int, ...], dtype: object) -> DeviceArray:
        """Return an array on the device, of any values."""
        return DeviceArray(self, shape, dtype)

    def _place(self, array: ArrayLike) -> tuple[str, int, object, tuple[int, ...], int]:
        if isinstance(array, DeviceArray):
            return self.name, self.index, array.dtype, array.shape, array.address
        return "cpu", 0, array.dtype, array.shape, int(array.ctypes.data)

    def _array(self, value: ArrayLike) -> DeviceArray:
        import onnx

        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
        return DeviceArray(self, tuple(value.shape()), dtype, value, value.data_ptr())

    @contextmanager
    def current(self) -> Iterator[None]:
        """Do nothing: ONNX Runtime switches to its device itself."""
        yield

    def allocate(self, size: int) -> int:
        """Return the address of ``size`` bytes: of memory given back earlier, where that fits."""
        found = self._blocks.reuse(size)
        return self._blocks.take(size) if found is None else found

    def release(self, address: int) -> None:
        """Take memory back for later use."""
        self._blocks.release(address)

    def _take(self, size: int) -> int:
        import onnxruntime

        made = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            [size], np.uint8, self.name, self.index
        )
        self._held[int(made.data_ptr())] = made
        return int(made.data_ptr())

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device."""
        if array.nbytes:
            self._bytes(address, array.nbytes).update_inplace(
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )

    def read(self, address: int, array: np.ndarray) -> None:
        """Copy from the device into a contiguous array."""
        if array.nbytes:
            array.reshape(-1).view(np.uint8)[:] = self._bytes(address, array.nbytes).numpy()

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device."""
        if size:
            values = self._bytes(source, size)
            # Of an older ONNX Runtime, as OpenVINO's, update_inplace takes NumPy's arrays alone.
            here = self.kind == dlpack.CPU
            self._bytes(target, size).update_inplace(values.numpy() if here else values)

    def clear(self, address: int, size: int) -> None:
        """Fill with zeros."""
        self.write(address, np.zeros(size, np.uint8))

    def wait(self) -> None:
        """Do nothing: ONNX Runtime waits at the end of calls and copies."""

    def _bytes(self, address: int, size: int) -> Any:
        """Return memory of the device as a value of ONNX Runtime."""
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue

        shape, dtype = (size,), np.dtype(np.uint8)
        capsule = dlpack.capsule(self, address, shape, dtype, self.index, self.kind)
        if hasattr(onnxruntime.OrtValue, "from_dlpack"):
            return onnxruntime.OrtValue.from_dlpack(capsule)
        # An older ONNX Runtime, as OpenVINO's; a newer one's has one argument.
        return onnxruntime.OrtValue(OrtValue.from_dlpack(capsule, False))
