"""Writing nodes of known shape: tensors brought from dims of some labels to dims of others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper

from linexport.graph.builder import NodeBuilder
from linexport.graph.monomials import ONE, Size
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, Index, fresh, size_of
from linexport.match.forms.terms import Leaf


class Nodes(NodeBuilder):
    """Nodes in the order in which they are written.

    Args:
        prefix: of all names.
        leaves: tensors of the graph, from which dynamic sizes can be read.
    """

    def __init__(self, prefix: str, leaves: Sequence[Leaf]) -> None:
        super().__init__(prefix)
        self._sources = _sources(leaves)

    def read_sizes(self, leaves: Sequence[Leaf]) -> None:
        """Read dynamic sizes from these tensors as well."""
        self._sources = _sources(leaves) | self._sources

    def grouped(self, leaf: Leaf, groups: Sequence[Index]) -> gs.Tensor:
        """A tensor with its dims as these; what it lacks is repeated."""
        present = [tuple(a for a in g if a in leaf.axes) for g in groups]
        if tuple(present) == leaf.dims and tuple(groups) == leaf.dims:
            return leaf.tensor
        # Repeated over chunks and places at once: the number of chunks is the size of no input.
        groups = [g if {*g} & leaf.axes else fresh(size_of(g)) for g in groups]
        axes = [(a,) for group in groups for a in group]
        if leaf.axes == {a for (a,) in axes}:
            return self._moved(leaf, groups)
        return self.merged(self.ordered(leaf, axes), axes, groups, set(leaf.axes))

    def _moved(self, leaf: Leaf, groups: Sequence[Index]) -> gs.Tensor:
        """Dims of the same labels: by a Transpose of few of them, where they have to be moved."""
        blocks = _blocks(leaf.dims, groups)
        first = {index[0]: index for index in blocks}
        source = [first[a] for index in leaf.dims for a in index if a in first]
        if source == blocks:
            return self.reshape(leaf.tensor, leaf.dims, groups)
        x = self.reshape(leaf.tensor, leaf.dims, source)
        order, shape = (
            [source.index(index) for index in blocks],
            [written_size(size_of(i)) for i in blocks],
        )
        x = self.add("Transpose", [x], np.dtype(x.dtype), attrs={"perm": order}, shape=shape)
        return self.reshape(x, blocks, groups)

    def ordered(self, leaf: Leaf, axes: Sequence[Index]) -> gs.Tensor:
        """Bring a tensor to these dims in this order, of size 1 where it has no such labels.

        Each dim is a label, or several that the tensor has side by side or not at all.
        """
        labels = [a for index in leaf.dims for a in index]
        own = sorted((i for i in axes if i[0] in labels), key=lambda i: labels.index(i[0]))
        x = self.reshape(leaf.tensor, leaf.dims, own)
        order = [own.index(i) for i in axes if i in own]
        if order != sorted(order):
            shape = [written_size(size_of(own[p])) for p in order]
            x = self.add("Transpose", [x], np.dtype(x.dtype), attrs={"perm": order}, shape=shape)
        missing = [p for p, i in enumerate(axes) if i not in own]
        if missing:
            places = gs.Constant(self.name("axes"), np.asarray(missing, np.int64))
            shape = [written_size(size_of(i)) if i in own else 1 for i in axes]
            x = self.add("Unsqueeze", [x, places], np.dtype(x.dtype), shape=shape)
        return x

    def merged(
        self, x: gs.Tensor, axes: Sequence[Index], groups: Sequence[Index], present: set[Axis]
    ) -> gs.Tensor:
        """Labels merged into groups, after repeating what is missing."""
        dtype = np.dtype(x.dtype)
        if any(a not in present for i in axes for a in i):
            sizes = [written_size(size_of(i)) for i in axes]
            x = self.add("Expand", [x, self.shape_of(axes)], dtype, shape=sizes)
        return self.reshape(x, axes, groups)

    def reshape(self, x: gs.Tensor, dims: Sequence[Index], groups: Sequence[Index]) -> gs.Tensor:
        """Bring a tensor of these dims to others of the same labels in the same order."""
        if [size_of(i) for i in dims] == [size_of(g) for g in groups]:
            return x
        shape = [written_size(size_of(g)) for g in groups]
        # Runtimes move transposes through an Unsqueeze or a Squeeze, not through a Reshape.
        for op, fewer, more in (("Unsqueeze", dims, groups), ("Squeeze", groups, dims)):
            if [index for index in more if index] == list(fewer):
                new = [place for place, index in enumerate(more) if not index]
                places = gs.Constant(self.name("axes"), np.asarray(new, np.int64))
                return self.add(op, [x, places], np.dtype(x.dtype), shape=shape)
        target = self.shape_of(groups, copied=dims)
        return self.add("Reshape", [x, target], np.dtype(x.dtype), shape=shape)

    def shape_of(
        self,
        groups: Sequence[Index],
        sizes: Sequence[Size] | None = None,
        copied: Sequence[Index] | None = None,
    ) -> gs.Tensor:
        """Sizes as a tensor: a constant if they are known or, in a Reshape, can be copied."""
        target = [size_of(g) for g in groups] if sizes is None else list(sizes)
        entries: list[int | None] = []
        for place, size in enumerate(target):
            same = copied is not None and place < len(copied) and size_of(copied[place]) == size
            entries.append(size.known if size.known is not None else 0 if same else None)
        # A Reshape infers one size from the number of elements.
        if copied is not None and entries.count(None) == 1:
            entries = [-1 if n is None else n for n in entries]
        if None not in entries:
            return gs.Constant(self.name("shape"), np.asarray(entries, np.int64))
        parts = [
            gs.Constant(self.name("size"), np.asarray([n], np.int64))
            if n is not None and n > 0
            else self.size(target[p])
            for p, n in enumerate(entries)
        ]
        if len(parts) == 1:
            return parts[0]
        attributes = {"axis": 0}
        return self.add("Concat", parts, np.dtype(np.int64), attrs=attributes, shape=[len(parts)])

    def size(self, size: Size) -> gs.Tensor:
        """A dynamic size as a tensor of one integer."""
        if size in self._sources:
            tensor, place = self._sources[size]
            attributes = {"start": place, "end": place + 1}
            return self.add("Shape", [tensor], np.dtype(np.int64), attrs=attributes, shape=[1])
        for known in self._sources:
            # n m = n times m, where n can be read from an input.
            rest = size.divided(known)
            if rest is not None and known != ONE and known.known is None:
                other = (
                    gs.Constant(self.name("size"), np.asarray([rest.known], np.int64))
                    if rest.known is not None
                    else self.size(rest)
                )
                first = self.size(known)
                return self.add("Mul", [first, other], np.dtype(np.int64), shape=[1])
        raise NotAttentionError(f"no input has the size {size}")

    def cast(self, x: gs.Tensor, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """Cast a tensor, where it has another dtype."""
        if np.dtype(x.dtype) == dtype:
            return x
        return self.add("Cast", [x], dtype, attrs={"to": element_type(dtype)}, shape=x.shape)


def side_by_side(group: Index, leaves: Sequence[Leaf]) -> list[Index]:
    """Return the labels of a dim in the fewest dims that all leaves have, or lack, as they are."""
    found: list[Index] = []
    for axis in group:
        if found and all(_stay_together(found[-1][-1], axis, leaf) for leaf in leaves):
            found[-1] += (axis,)
        else:
            found.append((axis,))
    return found


def _stay_together(first: Axis, second: Axis, leaf: Leaf) -> bool:
    if first not in leaf.axes and second not in leaf.axes:
        return True
    return any((first, second) in pairwise(index) for index in leaf.dims)


def _blocks(source: Sequence[Index], target: Sequence[Index]) -> list[Index]:
    """The target in pieces that stay together: in a dim of either, and in order in both."""
    flat = [a for index in source for a in index]
    following = set(pairwise(flat))
    places = [{a: n for n, i in enumerate(side) for a in i} for side in (source, target)]
    # Labels that follow each other in both move as one dim, so that a Transpose has few.
    blocks: list[Index] = []
    for axis in (a for index in target for a in index):
        last = blocks[-1][-1] if blocks else axis
        together = any(place[last] == place[axis] for place in places)
        if together and (last, axis) in following:
            blocks[-1] += (axis,)
        else:
            blocks.append((axis,))
    return blocks


def _sources(leaves: Sequence[Leaf]) -> dict[Size, tuple[gs.Tensor, int]]:
    """Return the tensor and dim from which each dynamic size can be read."""
    return {
        size_of(index): (leaf.tensor, place)
        for leaf in reversed(leaves)
        for place, index in enumerate(leaf.dims)
        if size_of(index).known is None
    }


def written_size(size: Size) -> int | str:
    """Return a size as a graph states it."""
    return str(size) if size.known is None else size.known


def element_type(dtype: np.dtype[np.generic]) -> int:
    """The number ONNX has for a dtype."""
    return int(helper.np_dtype_to_tensor_dtype(dtype))
