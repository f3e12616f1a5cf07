"""Loops over tokens, traced for a few steps: marked, so that ``rolling`` writes them as Scan.

    for t in range(x.shape[1]):            x[:, 0], ..., x[:, 6]
        h = step(h, x[:, t])        ->     seven steps, and
        outputs.append(h)                  steps(h_1, ..., h_7; length) of size x.shape[1]
    torch.stack(outputs, 1)

torch.export fixes a size that a loop counts to. Here the loop runs ``STEPS`` times, and lists of
as many tensors that are put together along the counted dimension keep its size as a symbol.
Everything else of the model is traced with that symbol.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import onnx
import torch
from onnxscript import values
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linexport.graph.dims import DIVIDED
from linexport.system.torch_internals import sizes
from linexport.system.untyped import Keywords, Positional, TorchCallable

STEPS = 7
"""A number that lists of other things (heads, layers, chunks) seldom have."""

LONGEST_CHUNK = 1024
"""Tokens that one step of a loop over chunks may take."""

GROWN = (1, 2, 4, 8)
"""By how much sides of an image are made longer than a loop over its pixels needs: layers behind
the loop may have a half of each, and loops of their own.
"""

DOMAIN, MARK = "linexport.trace", "Steps"
"""The node that marked steps are in a graph; ``rolling`` replaces it."""

library = torch.library.Library("linexport_trace", "DEF")
library.define("steps(Tensor[] steps, SymInt length) -> Tensor")


def _steps(steps: Sequence[Tensor], length: int) -> Tensor:
    return torch.stack(list(steps))


def _fake_steps(steps: Sequence[Tensor], length: Any) -> Tensor:
    return steps[0].new_empty((length, *steps[0].shape))


library.impl("steps", _steps, "CompositeExplicitAutograd")
torch.library.register_fake("linexport_trace::steps", _fake_steps, lib=library)
OPERATOR = torch.ops.linexport_trace.steps.default


def _steps_of_rows(
    info: Any, dims: Sequence[Any], steps: Sequence[Tensor], length: Any
) -> tuple[Tensor, int]:
    """Mark steps of a function that ``torch.vmap`` runs for each row: those of all rows."""
    size = info.batch_size
    rows = [
        step.expand(size, *step.shape) if dim is None else step.movedim(dim, 0)
        for step, dim in zip(steps, dims[0], strict=True)
    ]
    return OPERATOR(rows, length), 1


torch.library.register_vmap("linexport_trace::steps", _steps_of_rows, lib=library)


def symbol(steps: Sequence[object], length: object) -> Any:
    """Write marked steps as a node of a graph: the length, then the steps."""
    if not onnx.defs.has(MARK, 1, DOMAIN):
        onnx.defs.register_schema(_schema())
    return getattr(values.Opset(DOMAIN, 1), MARK)(length, *steps)


def _schema() -> onnx.defs.OpSchema:
    one, many = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption
    names = ("float16", "float", "double", "int32", "int64", "bool")
    kinds = [f"tensor({name})" for name in names]
    return onnx.defs.OpSchema(
        MARK,
        DOMAIN,
        1,
        inputs=[one("given", "T", param_option=many.Variadic, is_homogeneous=False)],
        outputs=[one("whole", "U")],
        type_constraints=[("T", kinds, "length and steps"), ("U", kinds, "any tensor")],
    )


class LoopFoundError(BaseException):
    """A loop that counts to a size. It ends a trace, and no model that catches errors stops it.

    Attributes:
        number: of steps in the example; None where several sizes say how many.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def counted(stop: bool = False) -> Iterator[list[TracedCount]]:
    """Note the sizes that loops count to, besides whole dimensions.

    torch takes it that such a loop always runs as often as for the example.

    Args:
        stop: at the first number that a loop counts to, whole dimensions included.

    Raises:
        LoopFoundError: there is one, and the trace stops at it.
    """
    found: list[TracedCount] = []

    def count(size: torch.SymInt) -> int:
        names, expression = sizes.symbols(size), sizes.expression(size)
        varies = bool(names) and sizes.varies(size)
        number = sizes.fixed(size)
        if varies and not expression.is_symbol:
            examples = {name: sizes.example(size, name) for name in names}
            found.append(TracedCount(expression, examples, number, traceback.extract_stack()))
        if stop and varies:
            raise LoopFoundError(number if len(names) == 1 else None)
        return number

    with sizes.counting_by(count), _Iterated(found):
        yield found


class _Iterated(TorchFunctionMode):
    """Loops over the elements of a tensor count to their number, as ``range`` does.

    torch fixes that number without asking for it as an integer of Python, and that of chunks where
    there are fewer tokens than chunks, or no whole number of tokens in each.
    """

    def __init__(self, found: list[TracedCount]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self,
        function: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function in (Tensor.__iter__, Tensor.unbind, torch.unbind):
            self._count(*args, **kwargs)
        given = function(*args, **kwargs)
        if function in (Tensor.chunk, torch.chunk):
            self._count_chunks(len(given), *args, **kwargs)
        return given

    def _count(self, input: Tensor, dim: int = 0) -> None:
        if input.dim() and isinstance(input.shape[dim], torch.SymInt):
            int(input.shape[dim])

    def _count_chunks(self, number: int, input: Tensor, chunks: int, dim: int = 0) -> None:
        size = input.shape[dim]
        if number != chunks and isinstance(size, torch.SymInt):
            examples = {name: sizes.example(size, name) for name in sizes.symbols(size)}
            stack = traceback.extract_stack()
            self.found.append(TracedCount(sizes.expression(size), examples, number, stack))


class TracedCount(NamedTuple):
    """A number of steps, as an expression in the sizes of dimensions."""

    steps: Any
    examples: Mapping[Any, int | None]
    """The size in the example of each dimension, by its symbol."""
    number: int
    """Number of steps in the example."""
    stack: traceback.StackSummary
    """Where it is counted."""

    def length(self) -> tuple[int, int] | None:
        """Return the size of a dimension, and another for which there are ``STEPS``.

        None where no size gives so many, or several dimensions say how many there are.
        """
        if len(self.examples) != 1:
            return None
        ((symbol, size),) = self.examples.items()
        found = _size_of(self.steps, symbol, STEPS)
        return (size, found) if size and found else None

    def sides(self, grown: int) -> dict[int, int]:
        """Return the sizes of an image whose pixels are the steps, and others with fewer pixels.

        Args:
            grown: by how much each side is longer than ``STEPS`` pixels need; see ``GROWN``.

        Returns:
            None of one dimension, and where the steps are not a product of one factor for each.
        """
        if len(self.examples) < 2:
            return {}
        factors = dict.fromkeys(self.examples, 1)
        for factor in self.steps.as_ordered_factors():
            names = factor.free_symbols
            if len(names) != 1:
                return {}
            factors[next(iter(names))] *= factor
        side = next(n for n in range(2, STEPS) if n ** len(factors) >= STEPS)
        found = {
            size: _size_of(factors[symbol], symbol, grown * side)
            for symbol, size in self.examples.items()
        }
        known = {size: n for size, n in found.items() if size and n}
        return known if len(known) == len(found) else {}


def _size_of(steps: Any, symbol: sizes.Symbol, number: int) -> int | None:
    """Return a size of a dimension for which an expression in it is a number."""
    lengths = (number * chunk for chunk in range(1, LONGEST_CHUNK + 1))
    return next((n for n in lengths if steps.subs(symbol, n) == number), None)


def width_of(size: int | torch.SymInt) -> int | None:
    """Return a size that is a number, be it as torch writes that of a chunk: T // (T // 8).

    It does where a transposed tensor is reshaped. All chunks are whole.
    """
    if isinstance(size, int):
        return size
    names = list(sizes.symbols(size))
    if len(names) != 1:
        return None
    found = {sizes.expression(size).subs(names[0], n) for n in (DIVIDED, 3 * DIVIDED)}
    return int(found.pop()) if len(found) == 1 else None


@contextmanager
def few_steps(chunk: int = 1) -> Iterator[Marks]:
    """Let loops over a symbolic size run as often as the example is long; mark what they give.

    Args:
        chunk: tokens of a step, where loops take slices.
    """
    counted: list[torch.SymInt] = []

    def count(size: torch.SymInt) -> int:
        number = None if sizes.is_constant(size) else sizes.hint(size)
        if number is None:
            return sizes.fixed(size)
        counted.append(size)
        return number

    def is_last(size: torch.SymInt, number: int, _file: str) -> bool:
        # ``if t == x.shape[1] - 1``: torch takes it that the number of the step is that of all
        # lengths. A size that a loop has counted to is compared as it is in the example.
        own = sizes.symbols(size)
        known = set().union(*map(sizes.symbols, counted))
        return bool(own) and own <= known and number == sizes.hint(size)

    with sizes.counting_by(count), sizes.comparing_by(is_last), Marks(counted, chunk) as marks:
        yield marks


class Marks(TorchFunctionMode):
    """Lists of one tensor for each step become one tensor of symbolic length.

    Attributes:
        positions: whether the numbers of all steps became a tensor, as ``tensor(range(T))``.
    """

    def __init__(self, counted: list[torch.SymInt], chunk: int) -> None:
        super().__init__()
        self.counted, self.chunk = counted, chunk
        self.positions = False
        self.written: dict[int, _Writes] = {}

    def __torch_function__(
        self,
        function: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        handler = HANDLERS.get(function)
        found = handler(self, *args, **kwargs) if handler else NotImplemented
        if found is not NotImplemented:
            return found
        if self.written:
            self._flush([*args, *kwargs.values()])
        return function(*args, **kwargs)

    def counts_alike(self, least: bool = False) -> bool:
        """Return whether all loops counted to as many steps as a list needs to be marked.

        Args:
            least: or to more, as those over the pixels of images do.
        """
        numbers = [sizes.hint(size) or 0 for size in self.counted]
        return all(n >= STEPS - 1 and (least or n <= STEPS) for n in numbers)

    def length(self, count: int) -> torch.SymInt | None:
        """Return the size that a list of this many steps has, if a loop counted to it.

        Of several, height and width of an image, it is the last: the list is made by that loop.
        """
        for size in reversed(self.counted):
            if sizes.hint(size) == count:
                return size
            if sizes.hint(size) == count * self.chunk:
                return size // self.chunk
        for size in self.counted:
            for name in sizes.symbols(size):
                if sizes.example(size, name) == count:
                    return sizes.as_size(size, name, count)
        return None

    def stack(self, tensors: Any, dim: int = 0) -> Any:
        """Mark ``torch.stack`` of a tensor for each step."""
        if not isinstance(tensors, list | tuple) or len(tensors) < STEPS - 1:
            return NotImplemented
        length = self.length(len(tensors))
        if length is None:
            return NotImplemented
        found = OPERATOR(list(tensors), length)
        return found.movedim(0, dim % found.dim())

    def cat(self, tensors: Any, dim: int = 0, **_: Any) -> Any:
        """Mark ``torch.cat`` of a slice, or of a chunk, for each step."""
        if not isinstance(tensors, list | tuple) or len(tensors) < STEPS - 1:
            return NotImplemented
        axis = dim % tensors[0].dim()
        size, *others = (width_of(t.shape[axis]) for t in tensors)
        if size is None or any(other != size for other in others):
            return NotImplemented
        marked = self.stack(tensors, axis)
        if marked is NotImplemented:
            return NotImplemented
        self._check_chunks(marked.shape[axis], size)
        return marked.flatten(axis, axis + 1)

    def _check_chunks(self, count: torch.SymInt, size: int) -> None:
        """Limit tokens to whole chunks: a rest would belong to no step."""
        whole = self.length((sizes.hint(count) or 0) * size)
        if whole is not None and whole % size != 0:
            raise ValueError(f"{whole} tokens are no whole chunks of {size}")

    def numbers(self, *given: Any, **options: Any) -> Any:
        """Return ``torch.tensor(range(T))``, or ``x.new_tensor(range(T))``, as an arange."""
        steps = given[-1] if given else options.pop("data", None)
        whole = isinstance(steps, range) and steps == range(len(steps)) and len(steps) >= STEPS - 1
        length = self.length(len(steps)) if whole else None
        if length is None:
            return NotImplemented
        self.positions = True
        of = given[0] if len(given) > 1 else None
        same: dict[str, Any] = {} if of is None else {"dtype": of.dtype, "device": of.device}
        arange: Any = torch.arange  # torch does not say that it takes a symbol
        return arange(length, **{**same, **options})

    def unbind(self, tensor: Tensor, dim: int = 0) -> Any:
        """Return the steps of a tensor along a symbolic dimension."""
        size = tensor.shape[dim]
        if isinstance(size, int):
            return NotImplemented
        return tuple(tensor.select(dim, t) for t in range(size))

    def split(self, tensor: Tensor, size: object, dim: int = 0) -> Any:
        """Return the chunks of a tensor along a symbolic dimension."""
        whole = tensor.shape[dim]
        if isinstance(whole, int) or size != self.chunk or (sizes.hint(whole) or 0) % size:
            return NotImplemented
        return tuple(tensor.narrow(dim, t, size) for t in range(0, whole, size))

    def chunks(self, input: Tensor, chunks: int, dim: int = 0) -> Any:
        """Return chunks of one token where there are no more tokens than chunks.

        Of more tokens each chunk has several: that they are to the model as single ones, the
        comparison with the original shows.
        """
        size = input.shape[dim]
        if isinstance(size, int) or (sizes.hint(size) or chunks + 1) > chunks:
            return NotImplemented
        return tuple(input.narrow(dim, t, 1) for t in range(size))

    def iterate(self, tensor: Tensor) -> Any:
        """Iterate over a symbolic dimension."""
        found = self.unbind(tensor) if tensor.dim() else NotImplemented
        return found if found is NotImplemented else iter(found)

    def write(self, tensor: Tensor, index: object, value: object) -> Any:
        """Collect ``y[:, t] = value``; after the last step, y is what was collected."""
        dim, step, width = step_of(index, tensor.dim())
        length: Any = tensor.shape[dim] if dim < tensor.dim() else 0
        number = None if isinstance(length, int) else sizes.hint(length)
        if step is None or number is None:
            return NotImplemented
        if not isinstance(value, Tensor) or number % max(width, 1):
            return NotImplemented
        rank = tensor.dim() - (width == 0)
        writes = self.written.setdefault(id(tensor), _Writes(tensor, dim, width))
        other = (writes.dim, writes.width) != (dim, width)
        if other or step in writes.steps or value.dim() != rank:
            self._flush([tensor])
            return NotImplemented
        writes.steps[step] = value
        count = number // max(width, 1)
        if len(writes.steps) == count:
            del self.written[id(tensor)]
            steps = [writes.steps[t] for t in range(count)]
            whole = self.cat(steps, dim) if width else OPERATOR(steps, length).movedim(0, dim)
            tensor.copy_(torch.cat(steps, dim) if whole is NotImplemented else whole)
        return None

    def read(self, tensor: Tensor, index: object) -> Any:
        """Return a step that was written in the loop before."""
        writes = self.written.get(id(tensor))
        dim, step, width = step_of(index, tensor.dim())
        if writes is None or (dim, width) != (writes.dim, writes.width):
            return NotImplemented
        return writes.steps.get(step, NotImplemented)

    def _flush(self, values: list[object]) -> None:
        """Write what was collected, before something else reads it."""
        for value in values:
            writes = self.written.pop(id(value), None) if isinstance(value, Tensor) else None
            for step, given in (writes.steps if writes else {}).items():
                assert writes is not None
                writes.place(step).copy_(given)


class _Writes:
    """Steps that a loop has written into a tensor so far, by ``step_of``."""

    def __init__(self, tensor: Tensor, dim: int, width: int) -> None:
        self.tensor, self.dim, self.width = tensor, dim, width
        self.steps: dict[int | None, Tensor] = {}

    def place(self, step: int | None) -> Tensor:
        """Return where a step is written."""
        assert step is not None
        if not self.width:
            return self.tensor.select(self.dim, step)
        return self.tensor.narrow(self.dim, step * self.width, self.width)


def step_of(index: object, rank: int) -> tuple[int, int | None, int]:
    """Return the dimension and the number of an index: ``[:, t]``, ``[..., t]``, ``[:, 8:16]``.

    The width of a slice is the third; its number is that among slices of its width.

    Args:
        index: as ``Tensor.__getitem__`` takes it.
        rank: of the tensor.
    """
    parts = index if isinstance(index, tuple) else (index,)
    numbers = [(i, p) for i, p in enumerate(parts) if p is not Ellipsis and p != slice(None)]
    if len(numbers) != 1:
        return 0, None, 0
    place, number = numbers[0]
    if Ellipsis in parts[:place]:
        place += rank - len(parts)
    if type(number) is int and number >= 0:
        return place, number, 0
    if isinstance(number, slice) and type(number.start) is type(number.stop) is int:
        width = number.stop - number.start
        plain = number.step in (None, 1) and number.start >= 0 and width > 0
        if plain and number.start % width == 0:
            return place, number.start // width, width
    return 0, None, 0


HANDLERS: dict[Any, Any] = {
    torch.stack: Marks.stack,
    torch.cat: Marks.cat,
    torch.concat: Marks.cat,
    torch.tensor: Marks.numbers,
    Tensor.new_tensor: Marks.numbers,
    torch.unbind: Marks.unbind,
    Tensor.unbind: Marks.unbind,
    torch.chunk: Marks.chunks,
    Tensor.chunk: Marks.chunks,
    torch.split: Marks.split,
    Tensor.split: Marks.split,
    Tensor.__iter__: Marks.iterate,
    Tensor.__setitem__: Marks.write,
    Tensor.__getitem__: Marks.read,
}
