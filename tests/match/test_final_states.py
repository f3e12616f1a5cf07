"""Models that return the state behind the last token have it from the fused node, and stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from torch.export import Dim

import linexport
from linexport.sources.factory import load_module
from tests.support import stateful_mixers as mixers
from tests.support.chunk_listing import CHUNK, HEADS, WIDTH, D, Projections
from tests.support.independent import Independent
from tests.support.stateful_mixers import Mixer, Outputs

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(Projections):
    """A mixer whose state is returned as well."""

    def forward(self, x: Tensor, *state: Tensor) -> Outputs:
        """(B, T, WIDTH), and (B, HEADS, D, D) where a state is given."""
        out, last = self.mixer(*self.heads(x), *state)
        return self.joined(out), last


@pytest.mark.parametrize(
    ("mixer", "op", "unit", "given"),
    [
        (mixers.gated_loop, "LinearAttention", 1, False),
        (mixers.gated_loop, "LinearAttention", 1, True),
        (mixers.signed_loop, "LinearAttention", 1, True),
        (mixers.delta_loop, "LinearAttention", 1, False),
        (mixers.delta_loop, "LinearAttention", 1, True),
        (mixers.transition_loop, "GeneralizedDeltaRule", 1, False),
        (mixers.transition_loop, "GeneralizedDeltaRule", 1, True),
        (mixers.listing, "LinearAttention", CHUNK, True),
        (mixers.padded_listing, "LinearAttention", 1, False),
        (mixers.padded_chunks, "LinearAttention", 1, True),
        (mixers.retention, "LinearAttention", 1, True),
        (mixers.prefix_sums, "LinearAttention", 1, True),
    ],
)
def test_states_around_all_tokens_are_those_of_the_fused_node(
    tmp_path: Path, mixer: Mixer, op: str, unit: int, given: bool
) -> None:
    examples = [torch.randn(2, 4 * CHUNK, WIDTH), *[torch.randn(2, HEADS, D, D)] * given]
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, *[{0: Dim.DYNAMIC}] * given)
    loaded = load_module((Layer(mixer).eval(), tuple(examples), dynamic), "states:layer")
    folder = tmp_path / "a"
    manifest = linexport.convert(loaded, folder, target="onnx", bench=False, threads=1)
    assert manifest.fused[op] == 1 and manifest.streaming.passed
    # Nothing computes the state once more; signs of rates are counted.
    operators = {n.op_type for n in onnx.load(folder / "model.onnx").graph.node}
    counted = {"CumSum"} if mixer is mixers.signed_loop else set()
    assert not operators & {"Scan", "Loop", "CumSum"} - counted
    check(folder, Layer(mixer), unit, given)


def test_a_state_that_is_read_before_it_is_written_is_given_and_returned(tmp_path: Path) -> None:
    examples = (torch.randn(2, 4 * CHUNK, WIDTH), torch.randn(2, HEADS, D, D))
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    layer = Layer(mixers.read_before).eval()
    loaded = load_module((layer, examples, dynamic), "states:layer")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused["LinearAttention"] == 1 and manifest.streaming.passed
    check(tmp_path / "a", layer, 1, given=True)


HALF = [mixers.gated_loop, mixers.signed_loop, mixers.delta_loop, mixers.read_before]


@pytest.mark.parametrize("mixer", HALF)
def test_states_in_half_precision_have_the_type_of_the_operator_s(
    tmp_path: Path, mixer: Mixer
) -> None:
    examples = (torch.randn(2, 4 * CHUNK, WIDTH).half(), torch.randn(2, HEADS, D, D).half())
    loaded = load_module((Layer(mixer).half().eval(), examples), "states:layer")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused["LinearAttention"] == 1
    assert manifest.status == "ok" and manifest.streaming.passed


def check(folder: Path, layer: Layer, unit: int, given: bool) -> None:
    """Compare outputs and last states, of all tokens at once and of the shortest pieces."""
    found, random = Independent(folder), np.random.default_rng(5)
    for length in (unit, 3 * CHUNK, 17 * CHUNK):
        x = random.standard_normal((3, length, WIDTH)).astype(np.float32)
        states = [random.standard_normal((3, HEADS, D, D)).astype(np.float32)] * given
        with torch.no_grad():
            expected = layer.double()(*(torch.from_numpy(a).double() for a in (x, *states)))
        for sizes in ([length], [unit] * (length // unit)):
            for got, exact in zip(found.outputs(x, sizes, states), expected, strict=True):
                assert got.shape == exact.shape
                assert np.abs(got - exact.numpy()).max() <= 2e-5 * np.abs(exact.numpy()).max()
