"""Weights of a graph that can be quantised.

    MatMul(x, W)               W (K, N), stored with one row an input
    MatMul(x, Transpose(W))    W (N, K), stored with one row an output
    Gemm(x, W, c)              either, as ``transB`` says; such as a shared expert's
    Gather(W, index)           W (V, D), a table such as a token embedding
    MixtureOfExperts           W (E, F, K), see ``experts`` and others of that name

A table whose values are also those of a product, as a tied output layer has them, is one weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from linexport.graph.operators import ELEMENTWISE
from linexport.quantization.block_quantisation import Matrix

LEAST_OUTPUTS = 32
"""Products with fewer outputs stay: gates and decays of a few heads, whose errors a recurrence
carries on, and which take next to no memory."""

LEAST_INPUTS = 16
"""Rows shorter than the smallest block stay."""

BLOCK = 32
"""Weights that share a scale: small enough for 4 bits, and fast in ONNX Runtime's kernels."""

MIXED_BITS = (4, 8)
"""Choices of ``auto`` for each weight."""

TABLE_BITS = 8
"""Fewest bits of a table."""

OTHER_READERS = "other operators read it as well"

ROUTER = "a router, whose errors choose other experts"

PASSED_ON = ELEMENTWISE | {"Softmax", "Reshape", "Cast", "Identity", "Transpose", "Unsqueeze"}
"""Operators between the product of a router and the largest of its results."""


@dataclass(frozen=True)
class Use:
    """One node that reads a weight.

    Attributes:
        node: its position in the graph.
        weight: name of the initializer.
        rows_are_inputs: the initializer is (K, N).
        activations: the value a product multiplies; None for a table, and where it is inside of
            an operator.
        is_lookup: the node looks up rows of a table.
    """

    node: int
    weight: str
    rows_are_inputs: bool
    activations: str | None
    is_lookup: bool = False


@dataclass(frozen=True)
class Experts:
    """A weight of a mixture of experts.

    Attributes:
        count: experts.
        chosen: experts of a token.
        fused: ONNX Runtime's kernel for experts reads the weight; see ``experts``. If not, a
            product for each expert does; see ``expert_products``.
        alternates: rows of gates and of values alternate where the weight is quantised.
        share: the value of the graph that says how much each expert of a token counts.
        side_by_side: an output is one row of all experts' inputs, (N, E K).
    """

    count: int
    chosen: int
    fused: bool
    alternates: bool
    share: str
    side_by_side: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight that can be quantised, with all its uses.

    Attributes:
        name: of the initializer.
        uses: nodes that read it, or an initializer of the same values.
        outputs, inputs: N and K; N is of all experts together.
        block: inputs that share a scale.
        experts: None for weights of other operators.
    """

    name: str
    uses: tuple[Use, ...]
    outputs: int
    inputs: int
    block: int = BLOCK
    experts: Experts | None = None

    @property
    def is_table(self) -> bool:
        """True if rows of the weight are looked up, as those of an embedding are."""
        return any(use.is_lookup for use in self.uses)

    @property
    def parts(self) -> tuple[str, str, str]:
        """Names of its values, scales and zero points where it is quantised."""
        return f"{self.name}/values", f"{self.name}/scales", f"{self.name}/zeros"

    @property
    def activations(self) -> tuple[str, ...]:
        """Values that it is multiplied with."""
        return tuple(use.activations for use in self.uses if use.activations is not None)

    def matrix(self, stored: NDArray) -> Matrix:
        """Return the initializer's values with one row an output, float32 (N, K)."""
        if self.experts is not None and self.experts.side_by_side:
            rows = stored.swapaxes(0, 1).reshape(stored.shape[1], -1)
        elif self.uses[0].rows_are_inputs:
            rows = stored.T
        else:
            rows = stored.reshape(-1, stored.shape[-1])
        return np.ascontiguousarray(rows, np.float32)


@dataclass(frozen=True)
class KeptWeight:
    """A weight that is not quantised.

    Attributes:
        name: of the initializer.
        reason: why.
    """

    name: str
    reason: str


def find(
    model: onnx.ModelProto, values: Mapping[str, NDArray]
) -> tuple[list[Weight], list[KeptWeight]]:
    """Return weights of the main graph that can be quantised, and those that stay, by first use.

    Args:
        model: a model; may lack the values of its initializers.
        values: floating-point values of its initializers of two dimensions or more, by name.
    """
    values = {name: array for name, array in values.items() if array.ndim == 2}
    uses: dict[str, list[Use]] = {}
    for use in _uses(model, values):
        uses.setdefault(use.weight, []).append(use)
    readers = _readers(model)
    found, kept = [], []
    for name, own in uses.items():
        shape = values[name].shape
        outputs, inputs = reversed(shape) if own[0].rows_are_inputs else shape
        reason = _reason(own, readers[name], outputs, inputs)
        if reason is None and _is_router(model, own):
            reason = ROUTER
        if reason:
            kept.append(KeptWeight(name, reason))
        else:
            found.append(Weight(name, tuple(own), outputs, inputs))
    return _tied(found, values), kept


def _uses(model: onnx.ModelProto, values: Mapping[str, NDArray]) -> Iterator[Use]:
    transposed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in values
    }
    for index, node in enumerate(model.graph.node):
        if node.domain:
            continue
        if node.op_type == "MatMul" and node.input[1] in values:
            yield Use(index, node.input[1], True, node.input[0])
        elif node.op_type == "MatMul" and node.input[1] in transposed:
            yield Use(index, transposed[node.input[1]], False, node.input[0])
        elif node.op_type == "Gemm" and node.input[1] in values and _is_plain(node):
            turned = any(a.name == "transB" and a.i for a in node.attribute)
            yield Use(index, node.input[1], not turned, node.input[0])
        elif node.op_type == "Gather" and node.input[0] in values and not _axis(node):
            yield Use(index, node.input[0], False, None, is_lookup=True)


def _is_router(model: onnx.ModelProto, uses: list[Use]) -> bool:
    """Return whether the largest results of a product are chosen from."""
    reached = {model.graph.node[use.node].output[0] for use in uses if not use.is_lookup}
    for node in model.graph.node:  # in the order of their values
        if node.domain or not reached & {*node.input}:
            continue
        if node.op_type == "TopK":
            return True
        if node.op_type in PASSED_ON:
            reached.update(node.output)
    return False


def _is_plain(node: onnx.NodeProto) -> bool:
    """Return whether a Gemm is x W + c, with or without c."""
    given = {a.name: a.f if a.name in ("alpha", "beta") else a.i for a in node.attribute}
    factors = (given.get("alpha", 1.0), given.get("beta", 1.0))
    return factors == (1.0, 1.0) and not given.get("transA", 0)


def _axis(node: onnx.NodeProto) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "axis"), 0)


def _readers(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of readers of each value, those behind a Transpose in its place."""
    count: dict[str, int] = {output.name: 1 for output in model.graph.output}
    for node in model.graph.node:
        for name in node.input:
            count[name] = count.get(name, 0) + 1
    for node in model.graph.node:
        if node.op_type == "Transpose":
            count[node.input[0]] += count.get(node.output[0], 0) - 1
    return count


def _reason(uses: list[Use], readers: int, outputs: int, inputs: int) -> str | None:
    """Return why a weight is not quantised, or None."""
    if len(uses) != readers or len({use.rows_are_inputs for use in uses}) > 1:
        return OTHER_READERS
    if outputs < LEAST_OUTPUTS:
        return f"{outputs} outputs, such as a gate or a decay of a few heads"
    return few_inputs(inputs)


def few_inputs(inputs: int) -> str | None:
    """Return why a weight of so many inputs is not quantised, or None."""
    if inputs < LEAST_INPUTS:
        return f"{inputs} inputs, fewer than the smallest block has"
    return None


def _tied(found: list[Weight], values: Mapping[str, NDArray]) -> list[Weight]:
    """Join tables with products of the same values."""
    tables = {w.name: w for w in found if w.is_table}
    rest = []
    for weight in found:
        if weight.name in tables:
            continue
        matrix = weight.matrix(values[weight.name])
        twin = next(
            (
                t
                for t in tables.values()
                if (t.outputs, t.inputs) == matrix.shape and np.array_equal(values[t.name], matrix)
            ),
            None,
        )
        if twin is None:
            rest.append(weight)
        else:
            tables[twin.name] = replace(twin, uses=(*twin.uses, *weight.uses))
    return [*tables.values(), *rest]


def floating_weights(model: onnx.ModelProto) -> list[TensorProto]:
    """Return the floating-point initializers of two dimensions or more."""
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    return [t for t in model.graph.initializer if len(t.dims) > 1 and t.data_type in kinds]
