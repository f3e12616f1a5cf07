"""Facts of the standard operators: what each does with the entries of its inputs, one row each.

    traits   what holds of its outputs, whatever the attributes are, see ``Trait``
    linear   groups of inputs that it is linear in together, the others z held:
             op(a x + b y, z) = a op(x, z) + b op(y, z)
    neutral  the entry of its first input that a reduction, or softmax, gives the same without

A rule that needs a fact asks for it here. What a program has implemented, such as the functions
that a plugin computes, is not a fact of operators and is listed by that program. Casts are taken
for those to another floating type.
``tests/graph/test_operators.py`` runs each operator and checks its row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache

import onnx


class Trait(Flag):
    """A fact about the outputs of an operator.

    Attributes:
        ELEMENTWISE: an entry is a function of the entries at its place, of inputs that broadcast.
        COPIES: the entries of the first input at their places, be it in another type.
        VIEW: the entries of the first input in their order, in any shape.
        AXES: the axes of the first input in another order, or axes of size 1 more or fewer.
        PERMUTES: every entry of the first input once, in another order.
        REPEATS: every entry of the first input, some several times.
        SELECTS: some entries of the first input, by their places.
        EXTREME: the largest or smallest of several entries of the first input.
        COMPARES: whether an entry of the first input is less than, or equal to, one of the second.
        LOGIC: a logical function of booleans.
        BITS: of the bits of integers.
        BOUNDS: the larger or smaller of the entries of several inputs.
        SUMS: sums or means of entries of the first input along axes.
        PRODUCT: products of entries of all inputs, or sums of them.
        CONTRACTION: sums of products of entries of several inputs, of one or with weights.
        WINDOW: of entries that are near each other along the last axes of the first input.
        INDEXES: its second input holds places in the first, or in the output.
        BODY: of graphs that it holds.
        LOOP: of a graph that it runs again and again.
        RANDOM: another at each call.
        SIZES: sizes of the first input, and none of its entries.
        NEVER_NEGATIVE: no number below 0.
    """

    ELEMENTWISE = auto()
    COPIES = auto()
    VIEW = auto()
    AXES = auto()
    PERMUTES = auto()
    REPEATS = auto()
    SELECTS = auto()
    EXTREME = auto()
    COMPARES = auto()
    LOGIC = auto()
    BITS = auto()
    BOUNDS = auto()
    SUMS = auto()
    PRODUCT = auto()
    CONTRACTION = auto()
    WINDOW = auto()
    INDEXES = auto()
    BODY = auto()
    LOOP = auto()
    RANDOM = auto()
    SIZES = auto()
    NEVER_NEGATIVE = auto()


Group = Collection[int]
"""Numbers of inputs."""

NONE = Trait(0)
E, C, V, A = Trait.ELEMENTWISE, Trait.COPIES, Trait.VIEW, Trait.AXES
POSITIVE, WINDOW, SUM = Trait.NEVER_NEGATIVE, Trait.WINDOW, Trait.SUMS
SELECT, EXTREME, DRAWS = Trait.SELECTS, Trait.EXTREME, Trait.RANDOM

FIRST: Sequence[Group] = ((0,),)
BOTH: Sequence[Group] = ((0, 1),)
EACH: Sequence[Group] = tuple((place,) for place in range(8))
ALL: Sequence[Group] = (range(2**31),)
FILLED: Sequence[Group] = ((0, 2),)
BIASED: Sequence[Group] = ((0, 2), (1, 2))


@dataclass(frozen=True)
class OperatorFacts:
    """A row of the table.

    Attributes:
        traits: see ``Trait``.
        linear: groups of inputs that it is linear in.
        neutral: entry that does not count in a reduction; None where all do, or it is none.
    """

    traits: Trait = NONE
    linear: Sequence[Group] = ()
    neutral: float | None = None


OPERATORS: Mapping[str, OperatorFacts] = {
    "Abs": OperatorFacts(E | POSITIVE),
    "Acos": OperatorFacts(E),
    "Acosh": OperatorFacts(E),
    "Add": OperatorFacts(E, BOTH),
    "AffineGrid": OperatorFacts(),
    "And": OperatorFacts(E | Trait.LOGIC),
    "ArgMax": OperatorFacts(),
    "ArgMin": OperatorFacts(),
    "Asin": OperatorFacts(E),
    "Asinh": OperatorFacts(E),
    "Atan": OperatorFacts(E),
    "Atanh": OperatorFacts(E),
    "Attention": OperatorFacts(),
    "AveragePool": OperatorFacts(WINDOW, FIRST),
    "BatchNormalization": OperatorFacts(),
    "Bernoulli": OperatorFacts(DRAWS),
    "BitCast": OperatorFacts(),
    "BitShift": OperatorFacts(E | Trait.BITS),
    "BitwiseAnd": OperatorFacts(E | Trait.BITS),
    "BitwiseNot": OperatorFacts(E | Trait.BITS),
    "BitwiseOr": OperatorFacts(E | Trait.BITS),
    "BitwiseXor": OperatorFacts(E | Trait.BITS),
    "BlackmanWindow": OperatorFacts(),
    "Cast": OperatorFacts(E | C, FIRST),
    "CastLike": OperatorFacts(E | C, FIRST),
    "CausalConvWithState": OperatorFacts(),
    "Ceil": OperatorFacts(E),
    "Celu": OperatorFacts(E),
    "CenterCropPad": OperatorFacts(),
    "Clip": OperatorFacts(E | Trait.BOUNDS),
    "Col2Im": OperatorFacts(NONE, FIRST),
    "Compress": OperatorFacts(SELECT, FIRST),
    "Concat": OperatorFacts(NONE, ALL),
    "ConcatFromSequence": OperatorFacts(),
    "Constant": OperatorFacts(),
    "ConstantOfShape": OperatorFacts(),
    "Conv": OperatorFacts(WINDOW, BIASED),
    "ConvInteger": OperatorFacts(WINDOW),
    "ConvTranspose": OperatorFacts(WINDOW, BIASED),
    "Cos": OperatorFacts(E),
    "Cosh": OperatorFacts(E | POSITIVE),
    "CumProd": OperatorFacts(),
    "CumSum": OperatorFacts(SUM, FIRST),
    "DFT": OperatorFacts(NONE, FIRST),
    "DeformConv": OperatorFacts(WINDOW),
    "DepthToSpace": OperatorFacts(Trait.PERMUTES, FIRST),
    "DequantizeLinear": OperatorFacts(),
    "Det": OperatorFacts(),
    "Div": OperatorFacts(E, FIRST),
    "Dropout": OperatorFacts(),
    "DynamicQuantizeLinear": OperatorFacts(),
    "Einsum": OperatorFacts(Trait.PRODUCT | Trait.CONTRACTION, EACH),
    "Elu": OperatorFacts(E),
    "Equal": OperatorFacts(E | Trait.COMPARES),
    "Erf": OperatorFacts(E),
    "Exp": OperatorFacts(E | POSITIVE),
    "Expand": OperatorFacts(Trait.REPEATS, FIRST),
    "EyeLike": OperatorFacts(Trait.SIZES),
    "Flatten": OperatorFacts(V, FIRST),
    "Floor": OperatorFacts(E),
    "GRU": OperatorFacts(),
    "Gather": OperatorFacts(SELECT | Trait.INDEXES, FIRST),
    "GatherElements": OperatorFacts(SELECT | Trait.INDEXES, FIRST),
    "GatherND": OperatorFacts(SELECT | Trait.INDEXES, FIRST),
    "Gelu": OperatorFacts(E),
    "Gemm": OperatorFacts(Trait.CONTRACTION, BIASED),
    "GlobalAveragePool": OperatorFacts(NONE, FIRST),
    "GlobalLpPool": OperatorFacts(POSITIVE),
    "GlobalMaxPool": OperatorFacts(EXTREME),
    "Greater": OperatorFacts(E | Trait.COMPARES),
    "GreaterOrEqual": OperatorFacts(E | Trait.COMPARES),
    "GridSample": OperatorFacts(NONE, FIRST),
    "GroupNormalization": OperatorFacts(),
    "HammingWindow": OperatorFacts(),
    "HannWindow": OperatorFacts(),
    "HardSigmoid": OperatorFacts(E | POSITIVE),
    "HardSwish": OperatorFacts(E),
    "Hardmax": OperatorFacts(POSITIVE),
    "Identity": OperatorFacts(E | C | V | A, FIRST),
    "If": OperatorFacts(Trait.BODY),
    "ImageDecoder": OperatorFacts(),
    "InstanceNormalization": OperatorFacts(),
    "IsInf": OperatorFacts(E),
    "IsNaN": OperatorFacts(E),
    "LRN": OperatorFacts(),
    "LSTM": OperatorFacts(),
    "LayerNormalization": OperatorFacts(),
    "LeakyRelu": OperatorFacts(E),
    "Less": OperatorFacts(E | Trait.COMPARES),
    "LessOrEqual": OperatorFacts(E | Trait.COMPARES),
    "LinearAttention": OperatorFacts(),
    "Log": OperatorFacts(E),
    "LogSoftmax": OperatorFacts(),
    "Loop": OperatorFacts(Trait.BODY | Trait.LOOP),
    "LpNormalization": OperatorFacts(),
    "LpPool": OperatorFacts(WINDOW | POSITIVE),
    "MatMul": OperatorFacts(Trait.PRODUCT | Trait.CONTRACTION, EACH),
    "MatMulInteger": OperatorFacts(),
    "Max": OperatorFacts(E | Trait.BOUNDS),
    "MaxPool": OperatorFacts(WINDOW | EXTREME),
    "MaxRoiPool": OperatorFacts(EXTREME),
    "MaxUnpool": OperatorFacts(),
    "Mean": OperatorFacts(E, ALL),
    "MeanVarianceNormalization": OperatorFacts(),
    "MelWeightMatrix": OperatorFacts(),
    "Min": OperatorFacts(E | Trait.BOUNDS),
    "Mish": OperatorFacts(E),
    "Mod": OperatorFacts(E),
    "Mul": OperatorFacts(E | Trait.PRODUCT, EACH),
    "Multinomial": OperatorFacts(DRAWS),
    "Neg": OperatorFacts(E, FIRST),
    "NegativeLogLikelihoodLoss": OperatorFacts(),
    "NonMaxSuppression": OperatorFacts(),
    "NonZero": OperatorFacts(),
    "Not": OperatorFacts(E | Trait.LOGIC),
    "OneHot": OperatorFacts(),
    "Optional": OperatorFacts(),
    "OptionalGetElement": OperatorFacts(),
    "OptionalHasElement": OperatorFacts(),
    "Or": OperatorFacts(E | Trait.LOGIC),
    "PRelu": OperatorFacts(E),
    "Pad": OperatorFacts(NONE, FILLED),
    "Pow": OperatorFacts(E),
    "QLinearConv": OperatorFacts(WINDOW),
    "QLinearMatMul": OperatorFacts(),
    "QuantizeLinear": OperatorFacts(),
    "RMSNormalization": OperatorFacts(),
    "RNN": OperatorFacts(),
    "RandomNormal": OperatorFacts(DRAWS),
    "RandomNormalLike": OperatorFacts(DRAWS),
    "RandomUniform": OperatorFacts(DRAWS),
    "RandomUniformLike": OperatorFacts(DRAWS),
    "Range": OperatorFacts(),
    "Reciprocal": OperatorFacts(E),
    "ReduceL1": OperatorFacts(POSITIVE, (), 0.0),
    "ReduceL2": OperatorFacts(POSITIVE, (), 0.0),
    "ReduceLogSum": OperatorFacts(),
    "ReduceLogSumExp": OperatorFacts(NONE, (), -math.inf),
    "ReduceMax": OperatorFacts(EXTREME, (), -math.inf),
    "ReduceMean": OperatorFacts(SUM, FIRST),
    "ReduceMin": OperatorFacts(EXTREME, (), math.inf),
    "ReduceProd": OperatorFacts(NONE, (), 1.0),
    "ReduceSum": OperatorFacts(SUM, FIRST, 0.0),
    "ReduceSumSquare": OperatorFacts(POSITIVE, (), 0.0),
    "RegexFullMatch": OperatorFacts(),
    "Relu": OperatorFacts(E | POSITIVE),
    "Reshape": OperatorFacts(V, FIRST),
    "Resize": OperatorFacts(),
    "ReverseSequence": OperatorFacts(Trait.PERMUTES, FIRST),
    "RoiAlign": OperatorFacts(),
    "RotaryEmbedding": OperatorFacts(),
    "Round": OperatorFacts(E),
    "STFT": OperatorFacts(NONE, FIRST),
    "Scan": OperatorFacts(Trait.BODY | Trait.LOOP),
    "Scatter": OperatorFacts(Trait.INDEXES),
    "ScatterElements": OperatorFacts(Trait.INDEXES),
    "ScatterND": OperatorFacts(Trait.INDEXES),
    "Selu": OperatorFacts(E),
    "SequenceAt": OperatorFacts(NONE, FIRST),
    "SequenceConstruct": OperatorFacts(),
    "SequenceEmpty": OperatorFacts(),
    "SequenceErase": OperatorFacts(),
    "SequenceInsert": OperatorFacts(),
    "SequenceLength": OperatorFacts(Trait.SIZES),
    "SequenceMap": OperatorFacts(Trait.BODY),
    "Shape": OperatorFacts(Trait.SIZES | POSITIVE),
    "Shrink": OperatorFacts(E),
    "Sigmoid": OperatorFacts(E | POSITIVE),
    "Sign": OperatorFacts(E),
    "Sin": OperatorFacts(E),
    "Sinh": OperatorFacts(E),
    "Size": OperatorFacts(Trait.SIZES | POSITIVE),
    "Slice": OperatorFacts(SELECT, FIRST),
    "Softmax": OperatorFacts(POSITIVE, (), -math.inf),
    "SoftmaxCrossEntropyLoss": OperatorFacts(),
    "Softplus": OperatorFacts(E | POSITIVE),
    "Softsign": OperatorFacts(E),
    "SpaceToDepth": OperatorFacts(Trait.PERMUTES, FIRST),
    "Split": OperatorFacts(SELECT, FIRST),
    "SplitToSequence": OperatorFacts(NONE, FIRST),
    "Sqrt": OperatorFacts(E | POSITIVE),
    "Squeeze": OperatorFacts(V | A, FIRST),
    "StringConcat": OperatorFacts(),
    "StringNormalizer": OperatorFacts(),
    "StringSplit": OperatorFacts(),
    "Sub": OperatorFacts(E, BOTH),
    "Sum": OperatorFacts(E, ALL),
    "SwiGLU": OperatorFacts(),
    "Swish": OperatorFacts(E),
    "Tan": OperatorFacts(E),
    "Tanh": OperatorFacts(E),
    "TensorScatter": OperatorFacts(NONE, BOTH),
    "TfIdfVectorizer": OperatorFacts(),
    "ThresholdedRelu": OperatorFacts(E),
    "Tile": OperatorFacts(Trait.REPEATS, FIRST),
    "TopK": OperatorFacts(),
    "Transpose": OperatorFacts(Trait.PERMUTES | A, FIRST),
    "Trilu": OperatorFacts(NONE, FIRST),
    "Unique": OperatorFacts(),
    "Unsqueeze": OperatorFacts(V | A, FIRST),
    "Upsample": OperatorFacts(),
    "Where": OperatorFacts(E, ((1, 2),)),
    "Xor": OperatorFacts(E | Trait.LOGIC),
}


def having(traits: Trait) -> frozenset[str]:
    """Return the operators that have at least one of some traits."""
    return frozenset(name for name, row in OPERATORS.items() if row.traits & traits)


def without_entries(neutral: float) -> frozenset[str]:
    """Return the reductions that give the same without entries of this value."""
    return frozenset(name for name, row in OPERATORS.items() if row.neutral == neutral)


def groups(op: str, count: int) -> list[set[int]]:
    """Return the groups of inputs that an operator is linear in, of those that it has.

    Args:
        op: a standard operator, or any other, which has none.
        count: how many inputs a node has; a last one that is left out is none.
    """
    row = OPERATORS.get(op)
    found = [] if row is None else [set(range(count)).intersection(g) for g in row.linear]
    return [group for group in found if group]


def is_linear(op: str, taken: Sequence[bool]) -> bool:
    """Return whether an operator is linear in the inputs that are taken, all others held.

    Args:
        op: its name.
        taken: of each input, whether it varies.
    """
    return {i for i, own in enumerate(taken) if own} in groups(op, len(taken))


def is_affine(op: str, taken: Sequence[bool]) -> bool:
    """Return whether an operator is a linear function of the inputs that are taken, plus others."""
    own = {i for i, varies in enumerate(taken) if varies}
    return any(own <= group for group in groups(op, len(taken)))


@cache
def typed_like_output(op: str) -> tuple[int, ...]:
    """Return the inputs of a standard operator that have the type of its first output."""
    try:
        schema = onnx.defs.get_schema(op)
    except onnx.defs.SchemaError:
        return ()
    made = schema.outputs[0] if schema.outputs else None
    if made is None or not made.is_homogeneous or "(" in made.type_str:
        return ()
    return tuple(i for i, one in enumerate(schema.inputs) if one.type_str == made.type_str)


ELEMENTWISE = having(Trait.ELEMENTWISE)
"""Operators that give each place a function of the entries there."""

ON_NUMBERS = ELEMENTWISE - having(Trait.BITS)
"""Such operators that floating numbers may be given to."""

COPIES = having(Trait.COPIES)
"""Operators that give the entries of their first input at their places, be it in another type."""

VIEWS = having(Trait.VIEW)
"""Operators that give the entries of their first input in their order."""

RESHAPES = COPIES | having(Trait.VIEW | Trait.AXES)
"""Operators that give every entry of their first input once, along other axes."""

LAYOUT = having(Trait.VIEW | Trait.AXES | Trait.REPEATS)
"""Operators that give all entries of their first input, along other axes or repeated."""

MOVES = COPIES | LAYOUT | having(Trait.PERMUTES | Trait.SELECTS)
"""Operators that give entries of their first input, by their places alone."""

CHOICES = MOVES | having(Trait.EXTREME)
"""Operators that give entries of their first input."""

AXES_ONLY = having(Trait.AXES)
"""Operators that change the axes of their input and nothing else."""

COMPARISONS = having(Trait.COMPARES)
"""Operators that compare two entries."""

BOOLEAN = having(Trait.COMPARES | Trait.LOGIC)
"""Operators that compare, or combine what was compared."""

BOUNDS = having(Trait.BOUNDS)
"""Operators that choose the larger or smaller of the entries of several inputs."""

SUMS = having(Trait.SUMS)
"""Operators that add up entries of their first input along axes, or average them."""

PRODUCTS = having(Trait.PRODUCT)
"""Operators that multiply entries of all inputs, and nothing else but add the products up."""

CONTRACTIONS = having(Trait.CONTRACTION) & PRODUCTS
"""Operators that add up products of entries."""

WINDOWS = having(Trait.WINDOW)
"""Operators that slide along axes."""

INDEXING = having(Trait.INDEXES)
"""Operators whose second input holds places."""

BODIES, LOOPS = having(Trait.BODY), having(Trait.LOOP)
"""Operators that hold graphs, and those that run one for each step."""

SIZES_ONLY = having(Trait.SIZES)
"""Operators that read the sizes of their input and none of its values."""

NEVER_NEGATIVE = having(Trait.NEVER_NEGATIVE)
"""Operators that give no number below 0."""

RANDOM = having(Trait.RANDOM)
"""Operators that draw numbers at every call."""

NOT_A_FUNCTION = RANDOM | {"Dropout"}
"""Operators that may not give the same output for the same input."""
