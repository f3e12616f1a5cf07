"""``NAME=DTYPE[SIZES]`` becomes example inputs of a module, by the parameters of its forward.

x=float32[2,16,64]      normal values
mask=bool[2,16]         mostly true
ids=int64[2,16]         rows of the embedding that forward looks them up in
count=int64[2]:1000     integers from 0 to 999

edges=int64[2,links=60]:nodes     integers below the size nodes of another input

Sizes with a name vary, and then no others do; a multiple says in which steps, or how the size of
one input follows from that of another:

x=float32[batch=2,3,height=64,width=32*3]
skip=float32[batch=2,3,height=2*64,width=64*3]
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from linexport.errors import UsageError

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
BOOL = "bool"
DTYPES = (*FLOATS, *INTEGERS, BOOL)

TRUE = 0.8
"""Share of true values: a mask that is mostly false may leave a token nothing to look at."""

TRIED = 2
"""Integers below this are rows of any embedding, until its own number of rows is known."""

_FORM = re.compile(
    r"(?P<name>[^\W\d]\w*)\s*=\s*(?P<dtype>\w+)\s*"
    r"\[(?P<sizes>[\w\s,=*]*)\]\s*(:\s*(?P<below>\w+))?"
)
_SIZE = re.compile(
    r"((?P<name>[^\W\d]\w*)\s*=\s*((?P<step>0*[1-9]\d*)\s*\*\s*)?)?(?P<count>0*[1-9]\d*)"
)


@dataclass(frozen=True)
class Varying:
    """A size that varies: its name, and the number that it is a multiple of."""

    name: str
    step: int = 1


@dataclass(frozen=True)
class ExampleInput:
    """One input as it was written.

    Attributes:
        name: of a parameter of forward.
        dtype: one of ``DTYPES``.
        sizes: of the tensor.
        below: integers are less than this; None where an embedding says it.
        varying: sizes that have a name, by their axis.
        within: the name of the size that ``below`` is, where that varies.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    below: int | None = None
    varying: Mapping[int, Varying] = field(default_factory=dict)
    within: str | None = None


def parse(texts: Iterable[str]) -> list[ExampleInput]:
    """Return example inputs that are written as above.

    Raises:
        UsageError: one is not, or a name is there twice.
    """
    found = [_parsed(text) for text in texts]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--input {name} is given twice. Give each input once.")
    sizes = {
        size.name: one.sizes[axis]
        for one in found
        for axis, size in one.varying.items()
        if size.step == 1
    }
    return [_limited(one, sizes) for one in found]


def _limited(one: ExampleInput, sizes: Mapping[str, int]) -> ExampleInput:
    """Return an input whose integers are below the number that a size is in the example."""
    if one.within is None:
        return one
    if one.within not in sizes:
        raise UsageError(
            f"--input {one.name}: found the limit {one.within}; expected a number, or the name of "
            f"a size that varies by 1: {', '.join(sizes) or 'no size has a name'}."
        )
    return replace(one, below=sizes[one.within])


def _parsed(text: str) -> ExampleInput:
    form = _FORM.fullmatch(text.strip())
    if form is None:
        raise UsageError(
            f"--input {text!r} is not of the form NAME=DTYPE[SIZES], for example "
            "'x=float32[2,16,64]' or 'ids=int64[2,16]'. In most shells it has to be quoted."
        )
    dtype, below = form["dtype"], form["below"]
    if dtype not in DTYPES:
        raise UsageError(f"--input {text}: found the type {dtype}; expected {', '.join(DTYPES)}.")
    written = [size.strip() for size in form["sizes"].split(",") if form["sizes"].strip()]
    read = [size for size in map(_SIZE.fullmatch, written) if size]
    if len(read) < len(written):
        raise UsageError(
            f"--input {text}: found the sizes [{form['sizes']}]; expected positive integers with "
            "commas, those of an example, with a name where they vary, as in [batch=2,3,height=64]."
        )
    sizes = tuple(int(size["step"] or 1) * int(size["count"]) for size in read)
    varying = {
        axis: Varying(size["name"], int(size["step"] or 1))
        for axis, size in enumerate(read)
        if size["name"]
    }
    number = int(below) if below is not None and below.isdecimal() else None
    if below is not None and (dtype not in INTEGERS or number == 0):
        raise UsageError(
            f"--input {text}: a limit such as :{below} is for integers, and at least 1. Leave it "
            "out."
        )
    within = below if number is None else None
    return ExampleInput(form["name"], dtype, sizes, number, varying, within)


def dynamic_shapes(
    module: torch.nn.Module, given: Sequence[ExampleInput]
) -> dict[str, dict[int, Any]] | None:
    """Return the sizes that vary, in torch.export's notation; None where none has a name.

    Args:
        module: whose parameters the inputs are.
        given: its inputs.

    Raises:
        UsageError: a name has two sizes that are not multiples of one number.
    """
    from torch.export import Dim

    sizes: dict[str, tuple[int, int]] = {}
    for one in given:
        for axis, size in one.varying.items():
            found = one.sizes[axis], size.step
            first, step = sizes.setdefault(size.name, found)
            if first // step != found[0] // size.step:
                raise UsageError(
                    f"--input {one.name}: {size.name} is {_multiple(*found)} there and "
                    f"{_multiple(first, step)} elsewhere; sizes of one name are equal, or "
                    "multiples of one number, such as 64 and 2*64. Give it another name."
                )
    if not sizes:
        return None
    counts = {name: Dim(name) for name in sizes}
    shapes = {
        one.name: {
            axis: counts[size.name] if size.step == 1 else size.step * counts[size.name]
            for axis, size in one.varying.items()
        }
        for one in given
    }
    return {name: shapes[name] for name in _names(module) if name in shapes}


def _multiple(size: int, step: int) -> str:
    return str(size) if step == 1 else f"{step}*{size // step}"


def drawn(
    module: torch.nn.Module, given: Sequence[ExampleInput], seed: int, location: str
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, tuple[int, int]]]:
    """Draw example inputs of a module.

    Args:
        module: in evaluation mode.
        given: its inputs.
        seed: of the values.
        location: what the user calls the module.

    Returns:
        args, kwargs, and the half-open ranges of integers that were given, by the number of the
        input.

    Raises:
        UsageError: forward has other parameters, or nothing says how large integers may be.
        UnsupportedModelError: the module fails on the inputs.
    """
    from linexport.sources.first_run import run_once, table_rows

    _check_names(module, given, location)
    limits = {one.name: one.below or TRIED for one in given}
    args, kwargs = _by_parameters(module, _tensors(given, limits, seed))
    order = [*_names(module)[: len(args)], *kwargs]
    undetermined = [one for one in given if one.dtype in INTEGERS and one.below is None]
    if undetermined:
        rows = table_rows(module, args, kwargs)
        for one in undetermined:
            place = order.index(one.name)
            if place not in rows:
                run_once(module, args, kwargs, location)  # where it fails, that is the reason
                text = f"{one.name}={one.dtype}[{','.join(map(str, one.sizes))}]"
                raise UsageError(
                    f"--input {text}: forward does not look {one.name} up in an embedding as it "
                    "is, so that nothing says how large its values may be. Add the number that "
                    f"they are below: --input {text}:1000 for 0 to 999."
                )
            limits[one.name] = rows[place][1]
        args, kwargs = _by_parameters(module, _tensors(given, limits, seed))
    ranges = {order.index(one.name): (0, one.below) for one in given if one.below is not None}
    return args, kwargs, ranges


def places(module: torch.nn.Module, given: Sequence[ExampleInput]) -> dict[int, str]:
    """Return the names of the sizes that integers are below, by the number of the input."""
    within = {one.name: one.within for one in given}
    order = [name for name in _names(module) if name in within]
    return {i: size for i, name in enumerate(order) if (size := within[name]) is not None}


def needed(module: torch.nn.Module) -> list[str]:
    """Return the parameters of forward that have no default."""
    return [p.name for p in _parameters(module) if p.default is inspect.Parameter.empty]


def _names(module: torch.nn.Module) -> list[str]:
    return [p.name for p in _parameters(module)]


def _parameters(module: torch.nn.Module) -> list[inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(module.forward).parameters.values()
    return [p for p in found if p.kind not in variable]


def _check_names(module: torch.nn.Module, given: Sequence[ExampleInput], location: str) -> None:
    names, own = {one.name for one in given}, _names(module)
    unknown = [one.name for one in given if one.name not in own]
    missing = [name for name in needed(module) if name not in names]
    if not unknown and not missing:
        return
    wrong = [f"no parameter {name}" for name in unknown]
    wrong += [f"no --input for {name}" for name in missing]
    raise UsageError(
        f"{location}: found {' and '.join(wrong)}; its forward takes "
        f"{', '.join(own) or 'nothing'}. Give --input NAME=DTYPE[SIZES] for each that has no "
        "default."
    )


def _tensors(
    given: Iterable[ExampleInput], limits: Mapping[str, int], seed: int
) -> dict[str, torch.Tensor]:
    """Return a tensor for each input, integers below their limits."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for one in given:
        dtype = getattr(torch, one.dtype)
        try:
            if one.dtype == BOOL:
                found[one.name] = torch.rand(one.sizes, generator=generator) < TRUE
                found[one.name][..., :1] = True
            elif one.dtype in INTEGERS:
                most = min(limits[one.name], torch.iinfo(dtype).max + 1)
                found[one.name] = torch.randint(most, one.sizes, generator=generator, dtype=dtype)
            else:
                found[one.name] = torch.randn(one.sizes, generator=generator).to(dtype)
        except RuntimeError as error:
            sizes = ",".join(map(str, one.sizes))
            raise UsageError(
                f"--input {one.name}={one.dtype}[{sizes}] cannot be drawn: {error}. Give the sizes "
                "of a small example, such as 2 sequences of 16."
            ) from None
    return found


def _by_parameters(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs by position where they can be, others in the order of the parameters."""
    bound = inspect.signature(module.forward).bind(**tensors)
    return bound.args, bound.kwargs
