"""One case of a language model compared with its original in both precisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linexport.parity.cases import Case
from linexport.parity.check import ModelUnderTest, Parity, case_record
from linexport.parity.compare import compare_arrays
from linexport.parity.language.prompts import BATCH, SEQUENCE
from linexport.parity.noise.float32_error import apart


def add_compared(
    tested: ModelUnderTest,
    parity: Parity,
    case: Case,
    expected: Sequence[np.ndarray],
    got: np.ndarray,
    output: str,
) -> None:
    """Add the comparison with the original to ``parity``.

    Args:
        tested: the artifact and its original.
        parity: takes the records.
        case: what was run.
        expected: outputs of the original, in float32 and in float64.
        got: of the artifact.
        output: its name.
    """
    rounding = apart(*expected)
    batch, length = case.sizes[BATCH], case.sizes[SEQUENCE]
    for name, values in zip(("float32", "float64"), expected, strict=True):
        result = compare_arrays(values, got, tested.tolerance, rounding)
        parity.counts += np.asarray(result.counts)
        parity.cases.append(case_record(case, result, batch, length, name, output, rounding))
