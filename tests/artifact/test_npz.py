"""Files of arrays whose names are those of a model's values."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linexport.system.npz import save_npz

NAMES = st.sampled_from(["file", "allow_pickle", "args", "../x", "a/b"]) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9
)


@given(st.dictionaries(NAMES, st.integers(0, 3), max_size=4))
def test_arrays_of_any_names_are_read_again(sizes: dict[str, int]) -> None:
    arrays = {name: np.arange(size, dtype=np.float32) for name, size in sizes.items()}
    first, second = io.BytesIO(), io.BytesIO()
    for file in (first, second):
        save_npz(file, arrays)
    assert first.getvalue() == second.getvalue()
    first.seek(0)
    with np.load(first) as found:
        assert len(found.files) == len(arrays)
        for name, values in arrays.items():
            np.testing.assert_array_equal(found[f"{name}.npy"], values)


def test_objects_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        save_npz(tmp_path / "x.npz", {"x": np.array([None])})
