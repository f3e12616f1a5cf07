"""``package.module:callable``: finding a function of the user's, and running it.

Its module is looked up on Python's path and in the current directory. This runs the user's code,
as asked; what it prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from linexport.errors import UsageError
from linexport.sources.files import first_line

_SPELLING = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_EXAMPLE = "for example my_package.my_module:make_model"


def find_callable(source: str, use: str) -> Callable[..., Any]:
    """The function that ``source`` names; ``use`` says which one is wanted, for the message.

    Raises:
        UsageError: it is misspelt, cannot be imported, or is not there.
    """
    spelling = _SPELLING.fullmatch(source)
    if not spelling:
        raise UsageError(
            f"{source!r} is neither a file nor package.module:callable. Write a dotted module "
            f"name, a colon and the name of a function, {_EXAMPLE}.{_of_file(source)}"
        )
    found: object = _import(source, spelling["module"])
    for name in spelling["name"].split("."):
        if not hasattr(found, name):
            place = getattr(found, "__file__", None) or spelling["module"]
            raise UsageError(f"{source}: there is no {name!r} in {place}.{_functions(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{source} is a {type(found).__name__}, not a function. Name {use}.")
    return found


def _of_file(source: str) -> str:
    """Return how a function of a Python file is named, where a source names one by its path."""
    file, suffix, name = source.partition(".py:")
    path = Path(file)
    place = f" in {path.parent}" if path.parent.name else ""
    return f" A module is named without .py: write {path.name}:{name}{place}." if suffix else ""


def _functions(module: Any) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f" Functions there: {', '.join(own)}." if own else " No functions are defined there."


def _import(source: str, name: str) -> ModuleType:
    try:
        with _current_directory_on_path(), user_code(f"importing {name} failed", ImportError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"{source}: no module named {error.name} on Python's path or in {Path.cwd()}. Run "
                f"in the folder that contains it, or install its package.{_of_file(source)}"
            ) from error
        raise UsageError(
            f"{source}: importing {name} needs {error.name}, which is not installed. Install it "
            "in this environment."
        ) from error
    except ImportError as error:
        raise UsageError(f"{source}: importing {name} failed: {error}.") from error


@contextlib.contextmanager
def _current_directory_on_path() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(folder)


@contextlib.contextmanager
def user_code(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn whatever the user's code raises into one line; its prints go to stderr.

    Raises:
        UsageError: with the line of the user's code.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        place = _user_line(error.__traceback__)
        raise UsageError(f"{what}{place}: {first_line(error)}. Fix it and run again.") from error


def user_frame(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's own code, else of an installed library."""
    standard, own = str(Path(importlib.__file__).parent.parent), tuple(_own_folders())
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(("<", *own))
        and "/site-packages/torch/" not in frame.filename.replace("\\", "/")
        and ("site-packages" in frame.filename or not frame.filename.startswith(standard))
    ]
    outside = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return outside[-1] if outside else None


def _own_folders() -> Iterator[str]:
    """Yield the folders of linexport itself, which may be anywhere; its parts need PyTorch."""
    for package in ("linexport", "linexport.models", "linexport.plugins"):
        found = importlib.util.find_spec(package)
        yield from (found and found.submodule_search_locations) or ()


def _user_line(trace: TracebackType | None) -> str:
    """Return " at file:line" of that frame."""
    frame = user_frame(trace)
    return f" at {frame.filename}:{frame.lineno}" if frame else ""
