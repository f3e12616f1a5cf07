"""What a step needs of a tensor is there, or an error names the tensor."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from linexport.errors import BuildError
from linexport.graph.tensors import (
    UnexpectedConstantError,
    UnknownShapeError,
    computed_value,
    constant_values,
    known_shape,
    static_size,
)


def test_a_shape_that_the_graph_states_is_returned() -> None:
    assert list(known_shape(gs.Variable("x", np.float32, ["batch", 3]))) == ["batch", 3]
    assert list(known_shape(gs.Constant("w", np.zeros((2, 4))))) == [2, 4]


def test_a_shape_without_axes_is_known() -> None:
    assert list(known_shape(gs.Variable("x", np.float32, []))) == []


def test_the_error_for_a_missing_shape_names_the_tensor() -> None:
    with pytest.raises(UnknownShapeError, match="'hidden'"):
        known_shape(gs.Variable("hidden", np.float32))


def test_a_static_size_is_a_number() -> None:
    assert static_size(gs.Variable("x", np.float32, ["batch", 3]), -1) == 3


@pytest.mark.parametrize("shape", [None, ["batch", "width"]])
def test_a_size_that_is_no_number_is_an_error(shape: list[str] | None) -> None:
    with pytest.raises(UnknownShapeError, match="'x'"):
        static_size(gs.Variable("x", np.float32, shape), 1)


def test_only_constants_have_values() -> None:
    values = constant_values(gs.Constant("w", np.arange(3)))
    assert values is not None
    assert values.tolist() == [0, 1, 2]
    assert constant_values(gs.Variable("x", np.float32, [3])) is None


def test_a_constant_is_not_a_computed_value() -> None:
    x = gs.Variable("x")
    assert computed_value(x) is x
    with pytest.raises(UnexpectedConstantError, match="'w'"):
        computed_value(gs.Constant("w", np.zeros(1)))


def test_these_errors_end_a_conversion_with_the_exit_code_of_a_failed_lowering() -> None:
    assert issubclass(UnknownShapeError, BuildError)
    assert issubclass(UnexpectedConstantError, BuildError)
