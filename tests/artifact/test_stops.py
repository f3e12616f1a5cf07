"""Stop strings wherever the borders of the pieces are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from linexport.artifact.text.stops import StopStrings

WORDS = st.text("ab", max_size=12)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_string_of_the_whole(
    whole: str, stops: list[str]
) -> None:
    """The first end of a stop string decides: what comes after it is never written."""
    expected = whole
    for length in range(len(whole) + 1):
        places = [whole[:length].find(stop) for stop in stops if stop in whole[:length]]
        if places:
            expected = whole[: min(places)]
            break
    writer, shown = StopStrings(stops), ""
    for letter in whole:
        shown += writer.feed(letter)
        if writer.stopped:
            break
    assert writer.stopped == (expected != whole or any(stop in whole for stop in stops))
    assert shown + writer.end() == expected


@given(st.lists(WORDS, max_size=8), st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_back_than_a_stop_string_may_begin(pieces: list[str], stop: str) -> None:
    writer, given_in, shown = StopStrings([stop]), "", ""
    for piece in pieces:
        given_in += piece
        shown += writer.feed(piece)
        if writer.stopped:
            assert shown == given_in[: given_in.index(stop)]
            return
        held = given_in[len(shown) :]
        assert given_in.startswith(shown) and stop.startswith(held) and held != stop
    assert stop not in given_in


def test_without_stop_strings_nothing_is_held_back() -> None:
    writer = StopStrings(())
    assert (writer.feed("text"), writer.end(), writer.stopped) == ("text", "", False)
