"""Calls of ONNX Runtime's CUDA provider as CUDA graphs, which it captures and replays itself.

    a call = the shapes of its inputs, and where its states are before and after it

    met first       launched
    met again       bound for good, to memory of its own for tokens and results, and captured
    from then on    replayed

A stream of tokens has two calls: its states go back and forth between two places. What a graph
computes with in between is memory that other calls use as well, so that a session that captures
runs one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from linexport.system.untyped import ArrayLike
from linexport.targets.runtime.device_array import DeviceArray

SETTING = {"enable_cuda_graph": "1"}
"""Option of the provider by which it captures the calls of a session that a run asks it to."""

KEPT = 64
"""Calls that are captured; all others are launched."""

LARGEST = 1 << 12
"""Bytes of inputs on the host, tokens mostly, up to which a call is worth a graph."""

Places = Mapping[str, DeviceArray]


@dataclass(frozen=True)
class _Call:
    """A call that was bound for good, with its memory by the names of inputs and outputs."""

    binding: object
    options: Any
    inputs: Mapping[str, ArrayLike]
    outputs: Mapping[str, ArrayLike]


class OrtGraphs:
    """Graphs of one session.

    Args:
        inner: an ``onnxruntime.InferenceSession``, opened with ``SETTING``.
        name: ONNX Runtime's name of its device.
        index: of the device.

    Attributes:
        launched: options of a run that is not to be captured.
    """

    def __init__(self, inner: Any, name: str, index: int) -> None:
        self._inner, self._device = inner, (name, index)
        self._met: dict[Any, Mapping[str, np.ndarray]] = {}
        self._calls: dict[Any, _Call] = {}
        self.launched = _options(-1)

    def run(
        self,
        inputs: Mapping[str, ArrayLike],
        following: Places,
        launch: Callable[[], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Run a call, from its graph if it was met before.

        Args:
            inputs: of the call.
            following: where its states go to.
            launch: runs it as it is.

        Returns:
            Its other outputs.
        """
        key = _key(inputs, following)
        if key in self._met and len(self._calls) < KEPT:
            self._calls[key] = self._bound(inputs, following, self._met.pop(key))
        if key in self._calls:
            return self._replay(self._calls[key], inputs)
        outputs = launch()
        if key is not None and len(self._met) < KEPT:
            self._met[key] = {name: np.empty_like(value) for name, value in outputs.items()}
        return outputs

    def _replay(self, call: _Call, inputs: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
        for name, value in call.inputs.items():
            value.update_inplace(np.ascontiguousarray(inputs[name]))
        self._inner.run_with_iobinding(call.binding, call.options)
        found = {name: value.numpy() for name, value in call.outputs.items()}
        # Of memory of the host that is a view, of what the next call writes to.
        return {n: x.copy() for n, x in found.items()} if self._device[0] == "cpu" else found

    def _bound(
        self, inputs: Mapping[str, ArrayLike], following: Places, outputs: Mapping[str, np.ndarray]
    ) -> _Call:
        import onnxruntime

        binding, place = self._inner.io_binding(), onnxruntime.OrtValue.ortvalue_from_shape_and_type

        def own(arrays: Mapping[str, np.ndarray]) -> dict[str, ArrayLike]:
            return {n: place(x.shape, x.dtype, *self._device) for n, x in arrays.items()}

        given = own({n: x for n, x in inputs.items() if not isinstance(x, DeviceArray)})
        made = own(outputs)
        for name, x in inputs.items():
            if name not in given:
                binding.bind_input(name, *self._device, x.dtype, x.shape, x.address)
        for name, x in following.items():
            binding.bind_output(name, *self._device, x.dtype, x.shape, x.address)
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in made.items():
            binding.bind_ortvalue_output(name, value)
        return _Call(binding, _options(len(self._calls)), given, made)


def _options(number: int) -> object:
    """Return the options of runs of the graph with this number; -1: of no graph."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _key(inputs: Mapping[str, ArrayLike], following: Places) -> object:
    """Return what makes calls the same; None where it is not worth a graph."""
    host = {n: x for n, x in inputs.items() if not isinstance(x, DeviceArray)}
    if sum(x.nbytes for x in host.values()) > LARGEST:
        return None
    shapes = tuple((n, x.shape, x.dtype.str) for n, x in sorted(host.items()))
    befores = ((n, x) for n, x in inputs.items() if n not in host)
    return shapes, *(
        tuple(sorted((n, x.shape, x.address) for n, x in places))
        for places in (befores, following.items())
    )


def are_possible(model: onnx.ModelProto) -> bool:
    """Return whether calls of a model can be alike: it has states, and none of them grows."""
    pasts = [i for i in model.graph.input if i.name.startswith("past_")]
    return bool(pasts) and all(
        size.HasField("dim_value") for i in pasts for size in i.type.tensor_type.shape.dim[1:]
    )
