"""Extensions that a model's code compiles while it runs, by ``torch.utils.cpp_extension``."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import wkv
from linexport.sources.files import first_line

COMPILER = Path("torch", "utils", "cpp_extension.py")
SOURCES = {"load": "sources", "load_inline": ""}
"""Functions there that compile an extension of some name, and their parameter of files."""

NAMED = 3
"""Source files of an extension that an error names."""


def compilation_failure(error: BaseException, place: str) -> UnsupportedModelError | None:
    """Return the error of code that failed while it compiled an extension; None of any other.

    Args:
        error: what it raised.
        place: the line of the code, " at FILE:LINE".
    """
    found = _extension(error.__traceback__)
    if found is None:
        return None
    name, sources = found
    advice = (
        "--stand-ins computes it in PyTorch."
        if wkv.known(sources)
        else "linexport knows no form of it in PyTorch: write one, and let the code call that "
        "where torch.cuda.is_available() is false."
    )
    return UnsupportedModelError(
        f"The model's code{place} compiles {_named(name, sources)}, which fails here: "
        f"{first_line(error).rstrip('.')}. {advice}"
    )


def _extension(trace: TracebackType | None) -> tuple[object, object] | None:
    """Return the name and the source files of the extension that a traceback compiles."""
    for frame, _ in traceback.walk_tb(trace):
        code = frame.f_code
        if code.co_name in SOURCES and Path(code.co_filename).parts[-3:] == COMPILER.parts:
            given = frame.f_locals
            return given.get("name"), given.get(SOURCES[code.co_name])
    return None


def _named(name: object, sources: object) -> str:
    """Return "the extension NAME (SOURCES)"."""
    single = isinstance(sources, str | os.PathLike)
    given = [sources] if single else list(sources) if isinstance(sources, Iterable) else []
    files = [Path(os.fspath(one)).name for one in given if isinstance(one, str | os.PathLike)]
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return f"the extension {name!r}" + (f" ({', '.join(files[:NAMED])}{more})" if files else "")
