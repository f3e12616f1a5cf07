"""What each standard operator does with the entries of its inputs: one row for each of ONNX's.

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
class Operator:
    """A row of the table.

    Attributes:
        traits: see ``Trait``.
        linear: groups of inputs that it is linear in.
        neutral: entry that does not count in a reduction; None where all do, or it is none.
    """

    traits: Trait = NONE
    linear: Sequence[Group] = ()
    neutral: float | None = None


OPERATORS: Mapping[str, Operator] = {
    "Abs": Operator(E | POSITIVE),
    "Acos": Operator(E),
    "Acosh": Operator(E),
    "Add": Operator(E, BOTH),
    "AffineGrid": Operator(),
    "And": Operator(E | Trait.LOGIC),
    "ArgMax": Operator(),
    "ArgMin": Operator(),
    "Asin": Operator(E),
    "Asinh": Operator(E),
    "Atan": Operator(E),
    "Atanh": Operator(E),
    "Attention": Operator(),
    "AveragePool": Operator(WINDOW, FIRST),
    "BatchNormalization": Operator(),
    "Bernoulli": Operator(DRAWS),
    "BitCast": Operator(),
    "BitShift": Operator(E | Trait.BITS),
    "BitwiseAnd": Operator(E | Trait.BITS),
    "BitwiseNot": Operator(E | Trait.BITS),
    "BitwiseOr": Operator(E | Trait.BITS),
    "BitwiseXor": Operator(E | Trait.BITS),
    "BlackmanWindow": Operator(),
    "Cast": Operator(E | C, FIRST),
    "CastLike": Operator(E | C, FIRST),
    "CausalConvWithState": Operator(),
    "Ceil": Operator(E),
    "Celu": Operator(E),
    "CenterCropPad": Operator(),
    "Clip": Operator(E | Trait.BOUNDS),
    "Col2Im": Operator(NONE, FIRST),
    "Compress": Operator(SELECT, FIRST),
    "Concat": Operator(NONE, ALL),
    "ConcatFromSequence": Operator(),
    "Constant": Operator(),
    "ConstantOfShape": Operator(),
    "Conv": Operator(WINDOW, BIASED),
    "ConvInteger": Operator(WINDOW),
    "ConvTranspose": Operator(WINDOW, BIASED),
    "Cos": Operator(E),
    "Cosh": Operator(E | POSITIVE),
    "CumProd": Operator(),
    "CumSum": Operator(SUM, FIRST),
    "DFT": Operator(NONE, FIRST),
    "DeformConv": Operator(WINDOW),
    "DepthToSpace": Operator(Trait.PERMUTES, FIRST),
    "DequantizeLinear": Operator(),
    "Det": Operator(),
    "Div": Operator(E, FIRST),
    "Dropout": Operator(),
    "DynamicQuantizeLinear": Operator(),
    "Einsum": Operator(Trait.PRODUCT | Trait.CONTRACTION, EACH),
    "Elu": Operator(E),
    "Equal": Operator(E | Trait.COMPARES),
    "Erf": Operator(E),
    "Exp": Operator(E | POSITIVE),
    "Expand": Operator(Trait.REPEATS, FIRST),
    "EyeLike": Operator(Trait.SIZES),
    "Flatten": Operator(V, FIRST),
    "Floor": Operator(E),
    "GRU": Operator(),
    "Gather": Operator(SELECT | Trait.INDEXES, FIRST),
    "GatherElements": Operator(SELECT | Trait.INDEXES, FIRST),
    "GatherND": Operator(SELECT | Trait.INDEXES, FIRST),
    "Gelu": Operator(E),
    "Gemm": Operator(Trait.CONTRACTION, BIASED),
    "GlobalAveragePool": Operator(NONE, FIRST),
    "GlobalLpPool": Operator(POSITIVE),
    "GlobalMaxPool": Operator(EXTREME),
    "Greater": Operator(E | Trait.COMPARES),
    "GreaterOrEqual": Operator(E | Trait.COMPARES),
    "GridSample": Operator(NONE, FIRST),
    "GroupNormalization": Operator(),
    "HammingWindow": Operator(),
    "HannWindow": Operator(),
    "HardSigmoid": Operator(E | POSITIVE),
    "HardSwish": Operator(E),
    "Hardmax": Operator(POSITIVE),
    "Identity": Operator(E | C | V | A, FIRST),
    "If": Operator(Trait.BODY),
    "ImageDecoder": Operator(),
    "InstanceNormalization": Operator(),
    "IsInf": Operator(E),
    "IsNaN": Operator(E),
    "LRN": Operator(),
    "LSTM": Operator(),
    "LayerNormalization": Operator(),
    "LeakyRelu": Operator(E),
    "Less": Operator(E | Trait.COMPARES),
    "LessOrEqual": Operator(E | Trait.COMPARES),
    "LinearAttention": Operator(),
    "Log": Operator(E),
    "LogSoftmax": Operator(),
    "Loop": Operator(Trait.BODY | Trait.LOOP),
    "LpNormalization": Operator(),
    "LpPool": Operator(WINDOW | POSITIVE),
    "MatMul": Operator(Trait.PRODUCT | Trait.CONTRACTION, EACH),
    "MatMulInteger": Operator(),
    "Max": Operator(E | Trait.BOUNDS),
    "MaxPool": Operator(WINDOW | EXTREME),
    "MaxRoiPool": Operator(EXTREME),
    "MaxUnpool": Operator(),
    "Mean": Operator(E, ALL),
    "MeanVarianceNormalization": Operator(),
    "MelWeightMatrix": Operator(),
    "Min": Operator(E | Trait.BOUNDS),
    "Mish": Operator(E),
    "Mod": Operator(E),
    "Mul": Operator(E | Trait.PRODUCT, EACH),
    "Multinomial": Operator(DRAWS),
    "Neg": Operator(E, FIRST),
    "NegativeLogLikelihoodLoss": Operator(),
    "NonMaxSuppression": Operator(),
    "NonZero": Operator(),
    "Not": Operator(E | Trait.LOGIC),
    "OneHot": Operator(),
    "Optional": Operator(),
    "OptionalGetElement": Operator(),
    "OptionalHasElement": Operator(),
    "Or": Operator(E | Trait.LOGIC),
    "PRelu": Operator(E),
    "Pad": Operator(NONE, FILLED),
    "Pow": Operator(E),
    "QLinearConv": Operator(WINDOW),
    "QLinearMatMul": Operator(),
    "QuantizeLinear": Operator(),
    "RMSNormalization": Operator(),
    "RNN": Operator(),
    "RandomNormal": Operator(DRAWS),
    "RandomNormalLike": Operator(DRAWS),
    "RandomUniform": Operator(DRAWS),
    "RandomUniformLike": Operator(DRAWS),
    "Range": Operator(),
    "Reciprocal": Operator(E),
    "ReduceL1": Operator(POSITIVE, (), 0.0),
    "ReduceL2": Operator(POSITIVE, (), 0.0),
    "ReduceLogSum": Operator(),
    "ReduceLogSumExp": Operator(NONE, (), -math.inf),
    "ReduceMax": Operator(EXTREME, (), -math.inf),
    "ReduceMean": Operator(SUM, FIRST),
    "ReduceMin": Operator(EXTREME, (), math.inf),
    "ReduceProd": Operator(NONE, (), 1.0),
    "ReduceSum": Operator(SUM, FIRST, 0.0),
    "ReduceSumSquare": Operator(POSITIVE, (), 0.0),
    "RegexFullMatch": Operator(),
    "Relu": Operator(E | POSITIVE),
    "Reshape": Operator(V, FIRST),
    "Resize": Operator(),
    "ReverseSequence": Operator(Trait.PERMUTES, FIRST),
    "RoiAlign": Operator(),
    "RotaryEmbedding": Operator(),
    "Round": Operator(E),
    "STFT": Operator(NONE, FIRST),
    "Scan": Operator(Trait.BODY | Trait.LOOP),
    "Scatter": Operator(Trait.INDEXES),
    "ScatterElements": Operator(Trait.INDEXES),
    "ScatterND": Operator(Trait.INDEXES),
    "Selu": Operator(E),
    "SequenceAt": Operator(NONE, FIRST),
    "SequenceConstruct": Operator(),
    "SequenceEmpty": Operator(),
    "SequenceErase": Operator(),
    "SequenceInsert": Operator(),
    "SequenceLength": Operator(Trait.SIZES),
    "SequenceMap": Operator(Trait.BODY),
    "Shape": Operator(Trait.SIZES | POSITIVE),
    "Shrink": Operator(E),
    "Sigmoid": Operator(E | POSITIVE),
    "Sign": Operator(E),
    "Sin": Operator(E),
    "Sinh": Operator(E),
    "Size": Operator(Trait.SIZES | POSITIVE),
    "Slice": Operator(SELECT, FIRST),
    "Softmax": Operator(POSITIVE, (), -math.inf),
    "SoftmaxCrossEntropyLoss": Operator(),
    "Softplus": Operator(E | POSITIVE),
    "Softsign": Operator(E),
    "SpaceToDepth": Operator(Trait.PERMUTES, FIRST),
    "Split": Operator(SELECT, FIRST),
    "SplitToSequence": Operator(NONE, FIRST),
    "Sqrt": Operator(E | POSITIVE),
    "Squeeze": Operator(V | A, FIRST),
    "StringConcat": Operator(),
    "StringNormalizer": Operator(),
    "StringSplit": Operator(),
    "Sub": Operator(E, BOTH),
    "Sum": Operator(E, ALL),
    "SwiGLU": Operator(),
    "Swish": Operator(E),
    "Tan": Operator(E),
    "Tanh": Operator(E),
    "TensorScatter": Operator(NONE, BOTH),
    "TfIdfVectorizer": Operator(),
    "ThresholdedRelu": Operator(E),
    "Tile": Operator(Trait.REPEATS, FIRST),
    "TopK": Operator(),
    "Transpose": Operator(Trait.PERMUTES | A, FIRST),
    "Trilu": Operator(NONE, FIRST),
    "Unique": Operator(),
    "Unsqueeze": Operator(V | A, FIRST),
    "Upsample": Operator(),
    "Where": Operator(E, ((1, 2),)),
    "Xor": Operator(E | Trait.LOGIC),
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
