"""Published layers in spellings of strangers: none is wrong, and each becomes what is said of it.

They are converted as a user converts them, then run by plain ONNX Runtime beside the original: at
lengths never traced, in pieces and in single tokens.
"""

from __future__ import annotations

import pytest

from linexport.graph.states import is_rows
from tests.support.converted import converted
from tests.support.strangers import STRANGERS

pytestmark = pytest.mark.usefixtures("one_thread")

IN_EVERY_RUN = ("MlstmBesideSoftmax", "Rwkv4")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in STRANGERS
    ],
)
def test_what_becomes_of_a_layer(name: str) -> None:
    found = converted(name)
    assert found.kind == STRANGERS[name].kind, found


def test_states_of_ops_are_no_rows_of_attention() -> None:
    """The maximum of a stabilised map was taken for keys, and its artifact could not be opened."""
    assert is_rows("past_key_0")
    assert is_rows("past_value_12")
    assert is_rows("past_mask")
    assert not is_rows("past_key_max_0")
