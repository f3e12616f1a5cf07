"""Every op's declaration is consistent in itself, and says what its nodes do."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from linexport.errors import OpError
from linexport.models import feature_maps, torch_ops
from linexport.plugins.ops.op import Op
from linexport.plugins.ops.registry import all_ops, attach_functions
from tests.support.op_cases import CASES, model


@pytest.fixture(params=sorted(all_ops()))
def op(request: pytest.FixtureRequest) -> Op:
    return all_ops()[request.param]


def test_every_op_has_a_case_here() -> None:
    assert "elu1" in feature_maps.kinds()
    assert set(CASES) == set(all_ops())


def test_names_of_the_declaration_are_those_of_the_schema(op: Op) -> None:
    formal = {*op.input_names, *op.output_names}
    assert set(op.token_axis) <= formal
    assert op.token_axis[op.input_names[0]] >= 0
    attributes = {argument.name for argument in torch_ops.overload(op)._schema.arguments}
    assert attributes - formal - {"parameters"} <= set(op.schema.attributes)
    assert not {"plugin_namespace", "launch", "aot", "absent_inputs"} & set(op.schema.attributes)
    if op.kernels:
        assert callable(importlib.import_module(op.kernels).plan)


def test_oracle_body_and_pytorch_agree_in_values_and_in_declared_shapes(op: Op) -> None:
    attributes, inputs = CASES[op.name]
    made = model(op, symbols=False)
    inferred = onnx.shape_inference.infer_shapes(made, strict_mode=True)
    declared = [[d.dim_value for d in o.type.tensor_type.shape.dim] for o in inferred.graph.output]
    expected = op.oracle(
        attributes, {k: np.float64(v) if k != "index" else v for k, v in inputs.items()}
    )
    got = onnxruntime.InferenceSession(made.SerializeToString()).run(None, inputs)
    schema = torch_ops.overload(op)._schema.arguments
    arguments = {
        a.name: [] if a.name == "parameters" else attributes.get(a.name)
        for a in schema
        if a.name not in inputs and (a.name in attributes or "Tensor" in str(a.type))
    }
    if op.name == "LinearAttention":  # its PyTorch operator has no defaults
        spec = importlib.import_module("linexport.plugins.ops.linear_attention.spec")
        arguments |= spec.LinearAttentionSpec.from_attributes(dict(attributes)).attributes()
    tensors = {name: torch.from_numpy(x) for name, x in inputs.items()}
    in_torch = torch_ops.overload(op)(**tensors, **arguments)
    in_torch = (in_torch,) if isinstance(in_torch, torch.Tensor) else in_torch
    for shape, oracle, body, tensor in zip(declared, expected, got, in_torch, strict=True):
        assert list(oracle.shape) == list(body.shape) == list(tensor.shape) == shape
        np.testing.assert_allclose(body, oracle, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tensor.numpy(), oracle, rtol=1e-4, atol=1e-5)


def test_token_axes_are_where_the_length_is(op: Op) -> None:
    inferred = onnx.shape_inference.infer_shapes(model(op, symbols=True), strict_mode=True)
    for info in [*inferred.graph.input, *inferred.graph.output]:
        name = info.name.removesuffix("_out")
        sizes = [d.dim_param for d in info.type.tensor_type.shape.dim]
        axis = op.token_axis.get(name)
        assert [i for i, size in enumerate(sizes) if size == "T"] == (
            [] if axis is None else [axis]
        )


def test_a_missing_input_is_an_error_that_names_it(op: Op) -> None:
    made = model(op, symbols=True)
    made.graph.node[0].input[0] = ""
    with pytest.raises(OpError, match=f"{op.name} lacks the input {op.input_names[0]}"):
        attach_functions(made)


def test_reading_the_declarations_imports_neither_torch_nor_kernels() -> None:
    """Opening an artifact reads them, and needs neither."""
    code = (
        "import sys; from linexport.plugins.ops.registry import all_ops; all_ops(); "
        "print([m for m in sys.modules if m in ('torch', 'triton') or 'kernels' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
