"""Kinds of ONNX operators by the values they give, whichever program holds the graph."""

NEVER_NEGATIVE = {"Relu", "Exp", "Softmax", "Sigmoid", "Softplus", "Abs", "Sqrt"}
"""Operators that give no number below 0."""

MOVES = {"Identity", "Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Slice"}
MOVES |= {"Gather", "Split", "ReduceMax", "ReduceMin", "Flatten"}
"""Operators that give a choice of entries of their first input."""

AXES_ONLY = frozenset(("Identity", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators that change the axes of their input and nothing else."""

SIZES_ONLY = {"Shape", "Size"}
"""Operators that read the sizes of their input and none of its values."""

RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
RANDOM |= {"RandomUniformLike"}
"""Operators that draw numbers at every call."""

NOT_A_FUNCTION = RANDOM | {"Dropout"}
"""Operators that may not give the same output for the same input."""
