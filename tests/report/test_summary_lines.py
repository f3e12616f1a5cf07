"""Lines of the summary: the same sentence in many cases is one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from linexport.manifest.rewriting import RejectionRecord
from linexport.report.summary import _refused
from linexport.report.text import grouped


def test_the_same_warning_in_many_cases_is_one_line_with_the_largest_error() -> None:
    cases = [f"It loses {n}e-0{9 - n} at batch 1, seq {10 * n}." for n in range(1, 9)]
    assert grouped(cases) == [f"{cases[-1]} The same in 7 more cases."]


def test_warnings_of_several_layers_are_one_line() -> None:
    said = [f"model.layers.{n}/attention was withdrawn: it differs." for n in range(24)]
    assert grouped(said) == [f"{said[0]} The same in 23 more cases."]
    assert grouped(said[:2])[0].endswith("The same in 1 more case.")


@given(st.lists(st.text(alphabet="abc .", min_size=1), unique=True))
def test_different_sentences_stay_as_they_are(sentences: list[str]) -> None:
    plain = [sentence for sentence in sentences if "." not in sentence]
    assert grouped(plain) == plain


def test_a_reason_is_said_once() -> None:
    found = [RejectionRecord(f"layer_{n}", "it looks ahead.", (), "a.py:3: y") for n in range(3)]
    other = RejectionRecord("norm", "it has no scale.")
    assert _refused([*found, other]) == [
        "layer_0, a.py:3: y: it looks ahead. The same in 2 more cases.",
        "norm: it has no scale.",
    ]
