"""Names for the dynamic sizes of a program: the user's own, else batch, seq, seq_2 ... by axis.

A size 64 n, where no input has the size n itself, is a dimension whose sizes are multiples:
"64*n", or "64*seq_blocks" by default. Where one has, it is a dimension that follows from it: "2*h"
of a decoder's skip from "h".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
import torch
from torch.export.graph_signature import InputSpec

from linexport.errors import UnsupportedModelError
from linexport.graph.dims import DimRange, batch_dims
from linexport.graph.monomials import parse
from linexport.graph.walk import all_graphs
from linexport.system.torch_internals.sizes import expression, hint, symbols
from linexport.trace.loops import capture

SYMBOL = re.compile(r"\b[su]\d+\b")
MULTIPLE = re.compile(r"(\d+)\*([su]\d+)")
DIVISOR = re.compile(r"//(\d+)\)")
CHUNKS = re.compile(r"\(\(?(?P<root>[su]\d+)//(?P<unit>\d+)\)\)?")


def name_symbols(
    program: torch.export.ExportedProgram, spec: object
) -> tuple[dict[str, str], dict[str, DimRange], dict[str, int]]:
    """Name the program's input symbols; returns the names, the ranges and the example's sizes.

    Raises:
        UnsupportedModelError: a size of an input follows from others in another way than as a
            multiple of one.
    """
    own, naming = _dims(spec), _Naming()
    sizes: dict[str, int] = {}
    dims: dict[str, DimRange] = {}
    axes: dict[str, set[int]] = {}
    places = list(_dynamic_places(program))
    for _, axis, size in places:
        axes.setdefault(str(size), set()).add(axis)
    following = {s: _multiple(s) for s in axes if _follows_another(s, axes)}
    for leaf, axis, size in places:
        symbol = str(size)
        multiple, root = _multiple(symbol)
        if isinstance(size, int) or root in naming.names or not root or symbol in following:
            continue
        dim = own.get((leaf, axis))
        name = naming.add(symbol, axis, dim)
        sizes[name] = hint(size) or 0
        dims[name] = _traced_range(program, size, multiple)
        if dim is not None:
            dims[name] = _limited(dims[name], dim)
    names, multiples = naming.names, naming.multiples
    _check_independent(axes, names, multiples)
    placed = {multiples.get(root, root): name for root, name in names.items()}
    batch = batch_dims({SYMBOL.sub(names[_multiple(s)[1]], s): axes[s] for s in placed})
    dims = {n: replace(d, batch=n in batch) for n, d in dims.items()}
    for multiple, root in following.values():
        name = f"{multiple}*{names[root]}"
        dims[name], sizes[name] = dims[names[root]].times(multiple), multiple * sizes[names[root]]
    return names, dims, sizes


@dataclass
class _Naming:
    """Names that were given to symbols.

    Attributes:
        names: by symbol.
        tied: by the name of a ``Dim``: one that linexport made is named by the first that it ties.
        multiples: the size 64 n, by the symbol n.
    """

    names: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    multiples: dict[str, str] = field(default_factory=dict)

    def add(self, size: str, axis: int, dim: torch.export.Dim | None) -> str:
        """Name the symbol of a size by its ``Dim`` or by its axis; returns the size's name."""
        multiple, root = _multiple(size)
        given = self._given(dim)
        name = given or self._by_axis(axis)
        self.names[root] = name
        if multiple > 1:
            self.names[root] = given.rpartition("*")[2] if given else f"{name}_blocks"
            self.multiples[root] = size
            name = f"{multiple}*{self.names[root]}"
        if dim is not None:
            self.tied.setdefault(str(dim.__name__), name)
        return name

    def _given(self, dim: torch.export.Dim | None) -> str | None:
        """Return the name that a user gave; one ``Dim`` may be several equal symbols."""
        if dim is None:
            return None
        name = str(dim.__name__)
        return self.tied.get(name) if _is_tie(dim) else name

    def _by_axis(self, axis: int) -> str:
        """Return a name that no other symbol has."""
        stem = {0: "batch", 1: "seq"}.get(axis, f"dim_{axis}")
        name, count = stem, 1
        while name in self.names.values():
            count += 1
            name = f"{stem}_{count}"
        return name


def _dynamic_places(
    program: torch.export.ExportedProgram,
) -> Iterator[tuple[int, int, int | torch.SymInt]]:
    """Yield the sizes of a program's inputs, each with the number of its input and its axis."""
    for leaf, node in enumerate(user_placeholders(program)):
        for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            yield leaf, axis, size


def user_placeholders(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Return the nodes of the flattened inputs that the user gives, in order."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [placeholders[spec.arg.name] for spec in specs if _is_users(spec)]


def _follows_another(size: str, sizes: Container[str]) -> bool:
    """Return whether a size is a multiple of one that an input has itself."""
    multiple, root = _multiple(size)
    return multiple > 1 and _follows(root, sizes)


def _traced_range(
    program: torch.export.ExportedProgram, size: int | torch.SymInt, multiple: int
) -> DimRange:
    """Return the range that a program was traced for, of a size that is a multiple of a symbol."""
    (base,) = symbols(size)
    limits = program.range_constraints.get(base)
    # torch assumes sizes of at least 2 while it traces; that is not a limit of the model.
    low, high = (limits.lower, limits.upper) if limits else (1, None)
    least = multiple * (1 if low <= 2 else int(low))
    return DimRange(least, None, _finite(high, multiple), multiple=multiple)


def limit_to_chunks(
    program: torch.export.ExportedProgram,
    names: Mapping[str, str],
    dims: Mapping[str, DimRange],
) -> dict[str, DimRange]:
    """Limit dims to multiples of the chunks that an output is put together of, or a loop takes.

    At other sizes the model leaves out the tokens behind the last whole chunk.
    """
    found = dict(dims)
    output = next(node for node in program.graph.nodes if node.op == "output")
    shapes = [getattr(x.meta.get("val"), "shape", ()) for x in output.args[0] if hasattr(x, "meta")]
    marked = [n.meta["val"].shape[0] for n in program.graph.nodes if n.target is capture.OPERATOR]
    for size in [*(size for shape in shapes for size in shape), *marked]:
        chunks = CHUNKS.fullmatch(str(size))
        root, unit = (chunks["root"], int(chunks["unit"])) if chunks else _whole_chunks(size)
        if unit > 1 and root in names:
            name = names[root]
            least = -(-found[name].min // unit) * unit
            found[name] = replace(found[name], min=least, multiple=unit)
    return found


def _whole_chunks(size: int | torch.SymInt) -> tuple[str, int]:
    """Return the symbol and the chunk of a size that is the symbol at whole chunks alone.

    torch writes it as 64*((s//64)), or as ((s//64))*((s//((s//64)))) where it infers the width of
    chunks from their number. The chunk of another size is 1.
    """
    found = list(symbols(size))
    units = {int(n) for n in DIVISOR.findall(str(size))}
    if isinstance(size, int) or len(found) != 1 or len(units) != 1:
        return "", 1
    (unit,) = units
    sizes = [expression(size).subs(found[0], n) for n in (unit, 5 * unit, 5 * unit + 1)]
    return (str(found[0]), unit) if sizes == [unit, 5 * unit, 5 * unit] else ("", 1)


def _multiple(size: str) -> tuple[int, str]:
    """Return 64 and n of a size 64 n; "" in the place of n where the size is another."""
    found = MULTIPLE.fullmatch(size)
    if found:
        return int(found[1]), found[2]
    return 1, size if SYMBOL.fullmatch(size) else ""


def _check_independent(
    sizes: Collection[str], names: Mapping[str, str], multiples: Mapping[str, str]
) -> None:
    """Check that every dynamic size is a dimension of its own.

    Raises:
        UnsupportedModelError: one follows from another.
    """
    for size in sizes:
        root = _multiple(size)[1]
        if size.isdecimal() or size == multiples.get(root, root) or _follows(root, sizes):
            continue
        known = SYMBOL.sub(lambda m: names.get(m[0], m[0]), size)
        raise UnsupportedModelError(
            f"An input has the size {known}, which follows from the size of another dimension. "
            "linexport takes dimensions that vary by themselves, and multiples of one, such as "
            "2*height. Derive one input from the other inside the model, or give each a Dim of its "
            "own."
        )


def _follows(root: str, sizes: Container[str]) -> bool:
    """Return whether a multiple of this symbol is one of a size that an input has itself."""
    return bool(root) and root in sizes


def _is_users(spec: InputSpec) -> bool:
    return spec.kind.name == "USER_INPUT"


def own_dims(spec: object) -> dict[tuple[int, int], torch.export.Dim]:
    """Return the ``torch.export.Dim`` objects that users name, by input and axis."""
    return {place: dim for place, dim in _dims(spec).items() if not _is_tie(dim)}


def _is_tie(dim: torch.export.Dim) -> bool:
    """Return whether a ``Dim`` is one that linexport made, whose name says nothing to users."""
    return str(dim.__name__).startswith("_")


def _dims(spec: object) -> dict[tuple[int, int], torch.export.Dim]:
    """Return the ``torch.export.Dim`` objects in dynamic_shapes, by input and axis."""
    return {
        place: dim for place, dim in marked_dims(spec).items() if isinstance(dim, torch.export.Dim)
    }


def marked_dims(spec: object) -> dict[tuple[int, int], object]:
    """Return what dynamic_shapes says of dims, by input and axis."""
    leaves: list[Any] = []

    def walk(node: object) -> None:
        per_axis = isinstance(node, dict) and all(isinstance(k, int) for k in node)
        if node is None or per_axis:
            leaves.append(node or {})
        elif isinstance(node, dict):
            for value in node.values():
                walk(value)
        elif isinstance(node, list | tuple):
            if any(not isinstance(x, dict | list | tuple | None.__class__) for x in node):
                leaves.append(dict(enumerate(node)))
            else:
                for value in node:
                    walk(value)

    walk(spec)
    return {(leaf, axis): dim for leaf, axes in enumerate(leaves) for axis, dim in axes.items()}


def _finite(limit: object, unit: int) -> int | None:
    """Return a limit in so many units as a number; None of one that is none."""
    known = isinstance(limit, int) or getattr(limit, "is_Integer", False)
    return unit * int(str(limit)) if known else None


def _limited(found: DimRange, dim: torch.export.Dim) -> DimRange:
    """Return a range within what a ``Dim`` says: a loop is traced without its limits."""
    least = found.min if dim.min <= 2 * found.multiple else max(found.min, int(dim.min))
    limits = [n for n in (found.max, _finite(dim.max, 1)) if n is not None]
    return replace(found, min=least, max=min(limits, default=None))


def length_warnings(
    dynamic_shapes: object, dims: Mapping[str, DimRange], sizes: Mapping[str, int]
) -> list[str]:
    """Return what to say of dims that nobody limited, and the code of the model does.

    Args:
        dynamic_shapes: of the model; a ``torch.export.Dim`` in it has the limits it is given.
        dims: what was traced.
        sizes: of the example.
    """
    given = {dim.__name__ for dim in own_dims(dynamic_shapes).values()}
    return [
        f"The artifact takes a {name} of {limits.min} to {limits.max} alone, as the code of the "
        f"model, traced at {sizes[name]}, does other things at other sizes: a table of that size, "
        "a comparison with it, or a scan by shifts of growing distance (a tree scan). A loop over "
        "tokens and cumulative sums take any number."
        for name, limits in dims.items()
        if limits.max is not None and name not in given
    ]


def rename_symbols(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename size symbols, in bodies too; a compound expression such as 2*s3 keeps its form.

    One that is a symbol or a number at all sizes, such as Min(s3, s3 padded), becomes that.
    """
    for graph in all_graphs(model):
        for info in [*graph.input, *graph.output, *graph.value_info]:
            for dim in info.type.tensor_type.shape.dim:
                if not dim.dim_param:
                    continue
                dim.dim_param = SYMBOL.sub(lambda m: names.get(m[0], m[0]), dim.dim_param)
                size = parse(dim.dim_param)
                if size.known is not None:
                    dim.dim_value = size.known
                elif str(size) in names.values():
                    dim.dim_param = str(size)
