"""Calls of ONNX Runtime's CUDA provider as CUDA graphs, which it captures and replays itself.

    a call = the shapes of its inputs, whose logits are kept, and where its states are before and
             after it

    met first          launched
    met again          bound for good, to memory of its own for tokens and results, and captured;
                       of several tokens a row when it is met for the eighth time
    from then on       replayed

A stream of tokens has two calls: its states go back and forth between two places. What a graph
computes with in between is memory that other calls use as well, so that a session that captures
runs one call at a time. ONNX Runtime gives no graph back: prompts, whose lengths are many, get half
of them, and are captured where they come often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from linexport.system.untyped import ArrayLike
from linexport.targets.runtime.device_array import DeviceArray
from linexport.targets.runtime.options import LOGITS_FROM

SETTING = {"enable_cuda_graph": "1"}
"""Option of the provider by which it captures the calls of a session that a run asks it to."""

KEPT = 64
"""Calls that are captured; all others are launched. Of several tokens a row half as many are."""

MET = 1024
"""Calls that are remembered before they are captured; those not met for longest are forgotten."""

STEP_MEETINGS, PROMPT_MEETINGS = 2, 8
"""Times that a call is met until it is captured: of one token a row, and of several."""

LARGEST = 1 << 12
"""Bytes of inputs on the host, tokens mostly, up to which a call is worth a graph."""

Places = Mapping[str, DeviceArray]


@dataclass(frozen=True)
class _Key:
    """Properties that calls of one graph share.

    Attributes:
        host: names, shapes and types of inputs on the host, and the value of ``LOGITS_FROM``, which
            a graph is made with.
        before, after: the same of states, and their addresses.
    """

    host: tuple[tuple[str, tuple[int, ...], str, bytes], ...]
    before: tuple[tuple[str, tuple[int, ...], int], ...]
    after: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def is_step(self) -> bool:
        """True of one token a row."""
        return all(len(shape) < 2 or shape[1] == 1 for _, shape, _, _ in self.host)


@dataclass(frozen=True)
class _Met:
    """A call that was launched so many times, with the shapes and types of its outputs."""

    times: int
    outputs: Mapping[str, tuple[tuple[int, ...], np.dtype]]


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
        self._met: OrderedDict[_Key, _Met] = OrderedDict()
        self._calls: dict[_Key, _Call] = {}
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
        if key is None:
            return launch()
        if key in self._calls:
            return self._replay(self._calls[key], inputs)
        met = self._met.pop(key, None)
        if met is not None and self._is_due(key, met):
            self._calls[key] = self._bound(inputs, following, met.outputs)
            return self._replay(self._calls[key], inputs)
        outputs = launch()
        shapes = {name: (value.shape, value.dtype) for name, value in outputs.items()}
        self._met[key] = _Met(1 if met is None else met.times + 1, shapes)
        if len(self._met) > MET:
            self._met.popitem(last=False)
        return outputs

    def _is_due(self, key: _Key, met: _Met) -> bool:
        """Return whether a call is to be captured that was launched before."""
        if key.is_step:
            return met.times + 1 >= STEP_MEETINGS and len(self._calls) < KEPT
        prompts = sum(not call.is_step for call in self._calls)
        room = min(KEPT // 2 - prompts, KEPT - len(self._calls))
        return met.times + 1 >= PROMPT_MEETINGS and room > 0

    def _replay(self, call: _Call, inputs: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
        for name, value in call.inputs.items():
            value.update_inplace(np.ascontiguousarray(inputs[name]))
        self._inner.run_with_iobinding(call.binding, call.options)
        found = {name: value.numpy() for name, value in call.outputs.items()}
        # Of memory of the host that is a view, of what the next call writes to.
        return {n: x.copy() for n, x in found.items()} if self._device[0] == "cpu" else found

    def _bound(
        self,
        inputs: Mapping[str, ArrayLike],
        following: Places,
        outputs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    ) -> _Call:
        import onnxruntime

        binding, value = self._inner.io_binding(), onnxruntime.OrtValue

        def own(shape: tuple[int, ...], dtype: np.dtype) -> ArrayLike:
            return value.ortvalue_from_shape_and_type(shape, dtype, *self._device)

        host = {n: x for n, x in inputs.items() if not isinstance(x, DeviceArray)}
        given = {n: own(x.shape, x.dtype) for n, x in host.items() if n != LOGITS_FROM}
        made = {name: own(*info) for name, info in outputs.items()}
        for name, x in inputs.items():
            if isinstance(x, DeviceArray):
                binding.bind_input(name, *self._device, x.dtype, x.shape, x.address)
        for name, x in following.items():
            binding.bind_output(name, *self._device, x.dtype, x.shape, x.address)
        for name in host.keys() & {LOGITS_FROM}:  # read on the host, the same in every call
            binding.bind_ortvalue_input(name, value.ortvalue_from_numpy(host[name]))
        for name, own_value in given.items():
            binding.bind_ortvalue_input(name, own_value)
        for name, own_value in made.items():
            binding.bind_ortvalue_output(name, own_value)
        return _Call(binding, _options(len(self._calls)), given, made)


def _options(number: int) -> object:
    """Return the options of runs of the graph with this number; -1: of no graph."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _key(inputs: Mapping[str, ArrayLike], following: Places) -> _Key | None:
    """Return the properties of a call; None where it is not worth a graph."""
    host = {n: x for n, x in inputs.items() if not isinstance(x, DeviceArray)}
    if sum(x.nbytes for x in host.values()) > LARGEST:
        return None
    befores = {n: x for n, x in inputs.items() if isinstance(x, DeviceArray)}
    return _Key(
        tuple(
            (n, x.shape, x.dtype.str, x.tobytes() if n == LOGITS_FROM else b"")
            for n, x in sorted(host.items())
        ),
        _places(befores),
        _places(following),
    )


def _places(arrays: Places) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    return tuple(sorted((n, x.shape, x.address) for n, x in arrays.items()))


def are_possible(model: onnx.ModelProto) -> bool:
    """Return whether calls of a model can be alike: it has states, and none of them grows."""
    pasts = [i for i in model.graph.input if i.name.startswith("past_")]
    return bool(pasts) and all(
        size.HasField("dim_value") for i in pasts for size in i.type.tensor_type.shape.dim[1:]
    )
