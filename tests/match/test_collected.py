"""Formulations as strangers write them: each becomes what the collection says, and none is wrong.

The check is independent: plain ONNX Runtime beside the module in float64, at lengths never traced,
in pieces and in single tokens.
"""

from __future__ import annotations

import pytest

from tests.support import formulations
from tests.support.outcomes import outcome_of
from tests.support.work import MOST

pytestmark = pytest.mark.usefixtures("one_thread")

IN_EVERY_RUN = {
    "strictly_causal",
    "exclusive_decay",
    "chunks_with_a_padded_state",
    "chunks_with_decay",
    "anticausal",
    "clamped_gates",
    "two_in_a_row",
    "token_shift",
    "shifted_triangle",
    "shifted_sums",
    "shifted_decays",
    "loop_that_writes",
    "gated_loop_read_before_writing",
    "rwkv6loop",
    "rwkv7",
    "transition_that_changes_signs",
    "fast_weights_of_rolled_features",
    "loop_over_states_of_chunks",
    "loop_over_chunks_of_products",
    "slices_of_one_token",
    "selectivescanreference",
    "ssd_minimal_discrete",
    "power_of_rectified_distance",
    "multiscaleretention",
    "xlstmparallel",
    "angles_of_tokens",
    "rotationmatrices",
    "polesofchannels",
    "aaren_by_a_logarithm",
    "aaren_by_a_softmax",
    "slstm_of_pairs",
    "gates_over_their_sum_in_log_space",
    "query_times_quotient_of_products",
    "two_normalised_states_of_a_loop",
    "eight_products_over_their_sum",
}
"""One of each kind."""


def _cases() -> list[object]:
    marks = {True: (), False: (pytest.mark.slow,)}
    return [
        pytest.param(name, marks=marks[name in IN_EVERY_RUN]) for name in formulations.COLLECTED
    ]


@pytest.mark.parametrize("name", _cases())
def test_what_becomes_of_a_formulation(name: str) -> None:
    formulation = formulations.COLLECTED[name]
    found = outcome_of(name)
    if formulation.reason:
        assert found.kind in ("refused", "left", "fused"), found
        assert any(formulation.reason in reason for reason in found.reasons), found.reasons
    else:
        # A rewrite that takes longer is kept where it is what gives the state.
        assert found.slower <= MOST * formulation.branches or found.kind == "streams"
        assert found.kind == ("streams" if formulation.streams else "fused"), found
        assert found.fused == formulation.nodes
