"""Values near the middle of two whole numbers: rounding decides, in the original as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor, nn

from linexport import parity
from linexport.parity.reference.extra_outputs import Change
from linexport.parity.routing.choices import RecordingSession, run_with
from linexport.parity.routing.near_ties import ForcedChoices, decide, within_rounding
from linexport.parity.tolerances import TOLERANCES
from linexport.targets.base import OrtSession
from tests.support.compared import check_language

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32 = TOLERANCES["float32"]
VOCABULARY, TIE = 64, 3
LARGEST = 100.0
LIMIT = FLOAT32.limit(LARGEST, 0.0)


class Eighths(nn.Module):
    """Logits rounded to eighths, as activations are to 8 bits; one is near the middle of two."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        values = random.integers(-90, 90, (VOCABULARY, VOCABULARY)) + 0.25
        values += random.choice([0.0, 0.5], values.shape)
        values[:, 0] = LARGEST
        values[TIE, 7] = 12.5 - margin
        named = torch.from_numpy(np.float32(values))
        self.values = nn.Parameter(named, requires_grad=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.values[input_ids].round() / 8


def graph(values: np.ndarray, op: str) -> onnx.ModelProto:
    """The same in ONNX."""
    held = {"values": values, "eight": np.float32(8)}
    nodes = [
        helper.make_node("Gather", ["values", "input_ids"], ["x"]),
        helper.make_node(op, ["x"], ["numbers"]),
        helper.make_node("Div", ["numbers", "eight"], ["logits"]),
    ]
    tokens = [
        helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "seq"])
        for name in ("input_ids", "attention_mask")
    ]
    shape = ["batch", "seq", VOCABULARY]
    logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, shape)
    weights = [numpy_helper.from_array(value, name) for name, value in held.items()]
    made = helper.make_graph(nodes, "eighths", tokens, [logits], weights)
    return helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])


def opener(model: onnx.ModelProto) -> Any:
    def opened(change: Change = lambda model: None) -> OrtSession:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy)
        return OrtSession(copy.SerializeToString(), 1)

    return opened


def checked(margin: float, by: float, op: str = "Round", error: float = 0.0) -> parity.Parity:
    """Parity of an artifact with another value at one place, and an error at another."""
    module = Eighths(margin)
    values = module.values.numpy().copy()
    values[TIE, 7] += np.float32(by)
    values[TIE, 9] += np.float32(error)
    opened = opener(graph(values, op))
    return check_language(module, opened, VOCABULARY)


def said(notes: list[str]) -> list[str]:
    return [note for note in notes if "rounding decides" in note]


@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_value_near_the_middle_may_become_either_number(share: float) -> None:
    found = checked(share * LIMIT, 2 * share * LIMIT)
    assert found.passed and len(said(found.notes)) == 1 and "next whole number" in found.notes[0]
    assert all(case.max_relative_error == 0 for case in found.cases)


@pytest.mark.parametrize("share", [1.2, 30.0])
def test_a_number_that_rounding_does_not_decide_is_wrong(share: float) -> None:
    assert checked(share * LIMIT, -share * LIMIT).passed
    found = checked(share * LIMIT, 2 * share * LIMIT)
    assert not found.passed and not said(found.notes)


def test_another_error_beside_such_a_value_is_found() -> None:
    assert not checked(0.1 * LIMIT, 0.2 * LIMIT, error=1.0).passed
    assert not checked(0.1 * LIMIT, 0.2 * LIMIT, error=-1.0).passed


@pytest.mark.parametrize("op", ["Floor", "Ceil"])
def test_another_way_to_round_is_wrong(op: str) -> None:
    assert not checked(0.1 * LIMIT, 0.0, op).passed


@given(st.integers(0, 2**31), st.integers(1, 9), st.sampled_from([1, 3]))
def test_the_original_takes_numbers_that_are_near_and_no_others(
    seed: int, tokens: int, rows: int
) -> None:
    random = np.random.default_rng(seed)
    values = random.uniform(-LARGEST, LARGEST, (rows, tokens, 5))
    near = random.random(values.shape) < 0.3
    values = np.where(near, np.floor(values) + 0.5 + random.uniform(-1e-4, 1e-4), values)
    values[..., 0] = LARGEST
    x = torch.from_numpy(np.float32(values))
    own = x.round().numpy()
    upper = np.floor(x.numpy()) + (random.random(values.shape) < 0.5)
    taken = np.where(near, upper, own).astype(np.float32)
    taken[..., 0] = LARGEST

    def run(deciding: Any) -> np.ndarray:
        with deciding:
            found: Tensor = x.clone().round_() if seed % 2 else x.round()
        return found.numpy().copy()

    found = decide([run, lambda deciding: run(deciding).astype("f8")], [taken], FLOAT32)
    assert found is not None and found.ties.of == values.size
    np.testing.assert_array_equal(found.outputs[0], taken)
    assert found.ties.differing == (taken != own).sum()
    far = taken.copy()
    far[0, 0, 0] = LARGEST - 1  # of 100, which is no middle
    assert decide([run], [far], FLOAT32) is None
    with ForcedChoices([far + 7]) as mode:  # the numbers of another call
        np.testing.assert_array_equal(x.round().numpy(), own)
    assert not mode.made


def test_what_does_not_round_to_whole_numbers_of_a_token_is_as_it_was() -> None:
    x = torch.tensor([0.26, 1.5])
    with ForcedChoices([np.zeros(2, np.float32)]) as mode:
        assert torch.round(x, decimals=1).tolist() == pytest.approx([0.3, 1.5])
        assert x[1].round() == 2 and x.to(torch.int32).round().tolist() == [0, 1]
    assert not mode.made


def test_a_graph_takes_numbers_in_place_of_its_own() -> None:
    module = Eighths(1e-4)
    opened = opener(graph(module.values.numpy(), "Round"))
    inputs = {"input_ids": np.array([[TIE, 5]]), "attention_mask": np.ones((1, 2), np.int64)}
    session = RecordingSession(opened)
    plain = session.run(inputs)
    choices = session.choices(1)
    assert choices["numbers"][0, 0, 7] == 12
    choices["numbers"][0, 0, 7] = 13
    outputs, made = run_with(opened, inputs, choices)
    changed = np.argwhere(outputs["logits"] != plain["logits"])
    assert changed.tolist() == [[0, 0, 7]] and outputs["logits"][0, 0, 7] == 13 / 8
    ties = within_rounding([made], FLOAT32)
    assert ties is not None and (ties.differing, ties.of) == (1, 2 * VOCABULARY)
    choices["numbers"][0, 0, 8] += 1
    assert within_rounding([run_with(opened, inputs, choices)[1]], FLOAT32) is None
