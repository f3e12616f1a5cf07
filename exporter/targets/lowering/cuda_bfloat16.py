"""Standard operators of which ONNX Runtime's CUDA provider has kernels in bfloat16.

A node of any other one is given to the CPU, which has no kernels of bfloat16, and the model does
not open. ONNX Runtime's own operators are called in float32.

Source: docs/OperatorKernels.md of ONNX Runtime at commit 001d12d, older than 1.31. Operators that
gained theirs in an operator set later than 18, such as Conv, are not in the table.
"""

from __future__ import annotations

OPERATORS = frozenset(
    {
        *("Abs", "Add", "Cast", "Compress", "Concat", "ConstantOfShape", "Div", "Dropout", "Erf"),
        *("Exp", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm"),
        *("Identity", "If", "LayerNormalization", "Loop", "MatMul", "Max", "Min", "Mod", "Mul"),
        *("Neg", "Pow", "ReduceSum", "Relu", "Reshape", "Scan", "ScatterElements", "ScatterND"),
        *("Shape", "Sigmoid", "Sign", "Size", "Slice", "Softmax", "Split", "Sqrt", "Squeeze"),
        *("Sub", "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    }
)
