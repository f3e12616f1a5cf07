"""The states of a graph: which input continues which output, and what begins a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from linexport.errors import OpError
from linexport.manifest.records import FIRST_CALL, KEY_VALUES, DimRecord, StateRecord
from linexport.plugins.ops.op import DOMAIN, read_node
from linexport.plugins.ops.registry import all_ops, known_shapes, linexport_nodes

LENGTH = ("past_length", "present_length")
"""The state that counts tokens, where positions are computed from it: int64 of shape (1,)."""

ROWS, PAST_MASK = ("past_key_", "past_value_"), "past_mask"
"""How states of keys and values begin that linexport has exposed, and that of their mask."""

PADDING = "PaddingMask"
"""Name in place of an op: of the mask that says which keys and values are padding."""

SCAN = ("past_scan_", "present_scan_")
"""How states of Scans begin that linexport has exposed."""

CONVOLVED = ("past_inputs_", "present_inputs_")
"""How states begin that are the last inputs of a convolution of standard ONNX."""

FIRST = ("past_first_", "present_first_")
"""How states begin that are an input of the first call of a sequence; its name follows."""

UNSET = -(1 << 31)
"""Value of an input of the first call before that call; no position has it."""

BEGUN = "_begun"
"""End of the name of a state that is 0 before the first call, and 1 after it."""

BUFFERS = ("past_buffer_", "present_buffer_")
"""How states of buffers begin; the buffer's name follows."""


@dataclass(frozen=True)
class State:
    """One state: feed the output ``present`` of a call to the input ``past`` of the next.

    Attributes:
        past, present: names of the input and the output.
        dtype: of both.
        shape: of the input; it starts with the batch, except for that of the tokens counted.
        op: that reads and writes it.
        growing_axis: the axis that each call makes longer by the tokens it is fed, None where the
            shape is fixed. Such a state begins empty.
        initial_value: value of every element before the first token.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str | None, ...]
    op: str
    growing_axis: int | None = None
    initial_value: float = 0.0

    @property
    def shared(self) -> bool:
        """True of a buffer, or an input, that all rows of a batch share."""
        return self.record().shared

    def start(self, batch: int) -> np.ndarray:
        """Return its value before the first token."""
        sizes = [size if isinstance(size, int) else batch for size in self.shape]
        if self.growing_axis is not None:
            sizes[self.growing_axis] = 0
        return np.full(sizes, self.initial_value, self.dtype)

    def fits(self, value: np.ndarray, sizes: dict[str, int]) -> bool:
        """Return whether ``value`` may be this state.

        ``sizes`` are those of named dimensions seen so far; those seen here are added.
        """
        return (
            value.dtype == self.dtype
            and len(value.shape) == len(self.shape)
            and all(
                found == (sizes.setdefault(size, found) if isinstance(size, str) else size)
                for found, size in zip(value.shape, self.shape, strict=True)
            )
        )

    def record(self) -> StateRecord:
        """Return the state as the manifest holds it, whose fields have the same order."""
        return StateRecord(*vars(self).values())

    @classmethod
    def from_record(cls, record: StateRecord) -> State:
        """Return the state of a record of the manifest."""
        return cls(*vars(record).values())


def batch_dim(states: Iterable[State | StateRecord]) -> str | None:
    """Return the dimension that states have for the rows of a batch; None where none has one."""
    first = (state.shape[0] for state in states)
    return next((size for size in first if isinstance(size, str)), None)


def rows_dim(states: Collection[State], dims: Mapping[str, DimRecord]) -> int | str:
    """Return the batch of the calls of a model: the name of the dimension, or a size that is fixed.

    Args:
        states: of the model.
        dims: the dynamic dimensions of its inputs.
    """
    own = [state for state in states if not state.shared]
    if states and not own:
        return next((name for name, limits in dims.items() if limits.batch), 1)
    fixed = (state.shape[0] for state in own if isinstance(state.shape[0], int))
    return batch_dim(own) or next(fixed, 1)


def initial_values(model: onnx.ModelProto) -> Iterator[dict[str, float]]:
    """Yield, for each linexport op with states, the values they begin with by name of the input.

    An op that does not say, of another version for example, is left out. Inputs of the first call
    come first.
    """
    yield {i.name: float(UNSET) for i in model.graph.input if i.name.startswith(FIRST[0])}
    casts = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Cast"}
    shapes = known_shapes(model)
    for node in model.graph.node:
        op = all_ops().get(node.op_type) if node.domain == DOMAIN else None
        if op is None or not op.has_state:
            continue
        try:
            ports = op.states(read_node(node, op, shapes))
        except (OpError, LookupError, TypeError, AssertionError):
            continue
        pasts = [(node.input[p.past], p) for p in ports if p.past < len(node.input)]
        yield {casts.get(name, name): port.initial_value for name, port in pasts if name}


def find_states(model: onnx.ModelProto, given: Collection[str] = ()) -> list[State]:
    """Return the states whose past is an input and whose present is an output of the graph.

    A Cast may lie between them and the node, and in front of it a product with signs or turns of
    the tokens.
    ``given`` are inputs of the original model: a past among them is its caller's to carry.
    """
    ports = _Ports(
        {i.name: i for i in model.graph.input},
        {o.name for o in model.graph.output},
        known_shapes(model),
        given,
    )
    found = [*_states_of_nodes(model, ports), *_states_by_name(ports)]
    rows = [name for name in ports.inputs if is_rows(name) and name not in given]
    found += [_rows(ports.inputs[name], ports.shapes[name]) for name in rows]
    # Last: the batch is read from the first state.
    before, after = LENGTH
    if ports.has(before, after):
        found.append(State(before, after, "int64", ports.shapes[before], "Positions"))
    return found


@dataclass(frozen=True)
class _Ports:
    """Inputs and outputs of a graph.

    Attributes:
        inputs: by name.
        outputs: their names.
        shapes: of values, by name.
        given: inputs of the original model.
    """

    inputs: Mapping[str, onnx.ValueInfoProto]
    outputs: Collection[str]
    shapes: Mapping[str, tuple[int | str | None, ...]]
    given: Collection[str]

    def has(self, past: str, present: str) -> bool:
        """Return whether these may be a state that is not the caller's."""
        return past in self.inputs and present in self.outputs and past not in self.given

    def state(self, past: str, present: str, op: str, initial_value: float) -> State:
        """Return a state that an input and an output are."""
        kind = self.inputs[past].type.tensor_type.elem_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind).name
        return State(past, present, dtype, self.shapes[past], op, initial_value=initial_value)


def _states_of_nodes(model: onnx.ModelProto, ports: _Ports) -> Iterator[State]:
    """Yield the states of linexport ops, which may be cast or turned on the way."""
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    before = {n.output[0]: n.input[0] for n in casts if n.input[0] in ports.inputs}
    before |= _turned(model, ports.inputs)
    behind = {n.input[0]: n.output[0] for n in casts if n.output[0] in ports.outputs}
    for node, op, view in linexport_nodes(model):
        for port in op.states(view):
            if len(node.input) <= port.past or len(node.output) <= port.present:
                continue
            past, present = node.input[port.past], node.output[port.present]
            past, present = before.get(past, past), behind.get(present, present)
            if not ports.has(past, present):
                continue
            yield ports.state(past, present, node.op_type, port.initial_value)
            begun, after = (f"{name}{BEGUN}" for name in (past, present))
            if begun in ports.inputs:
                yield State(begun, after, "float32", ports.shapes[begun], node.op_type)


def _states_by_name(ports: _Ports) -> Iterator[State]:
    """Yield the states of standard operators, and of first calls, which their names tell."""
    for names, op, initial_value in (
        (SCAN, "Scan", 0.0),
        (CONVOLVED, "Conv", 0.0),
        (FIRST, FIRST_CALL, float(UNSET)),
    ):
        for past in (name for name in ports.inputs if name.startswith(names[0])):
            present = past.replace(*names, 1)
            if ports.has(past, present):
                yield ports.state(past, present, op, initial_value)


def _turned(model: onnx.ModelProto, inputs: Collection[str]) -> dict[str, str]:
    """Return pasts that signs or turns multiply, see ``expose_past_present``, by what they become.

    So is what a sequence begins with in place of a past. A turn may be in another type and shape,
    and sum the parts of pairs.
    """
    found = {name: name for name in inputs if name.startswith("past_")}
    for node in model.graph.node:
        if node.op_type in ("Cast", "MatMul", "Mul", "ReduceSum", "Reshape", "Where"):
            pasts = [found[name] for name in node.input if name in found]
            found |= dict.fromkeys(node.output, pasts[0]) if pasts else {}
    return found


def is_rows(name: str) -> bool:
    """Return whether an input is named as rows of attention are, or their mask.

    ``past_key_max_0`` is not: it is a state of an op.
    """
    stem = next((stem for stem in ROWS if name.startswith(stem)), None)
    return name == PAST_MASK or (stem is not None and name.removeprefix(stem).isdecimal())


def _rows(past: onnx.ValueInfoProto, shape: tuple[int | str | None, ...]) -> State:
    """Return the state of rows of attention, or of their mask; it grows where no window is kept."""
    growing = next((n for n, size in enumerate(shape) if n and not isinstance(size, int)), None)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(past.type.tensor_type.elem_type).name
    op = PADDING if past.name == PAST_MASK else KEY_VALUES
    return State(past.name, past.name.replace("past", "present", 1), dtype, shape, op, growing)
