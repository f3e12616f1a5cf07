"""``package.module:callable``: finding a function or class of the user's, and running it.

    package.module:make          a module on Python's path or in the current directory
    folder/net.py:Net            a file
    net.py:Net(dim=64, heads=4)  called with these arguments, which are literals

This runs the user's code, as asked; what it prints goes to stderr.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from linexport.errors import UsageError
from linexport.sources.files import first_line

_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_SPELLING = re.compile(
    rf"((?P<file>.+\.py)|(?P<module>{_NAME})):(?P<name>{_NAME})(?P<arguments>\(.*\))?", re.DOTALL
)
_LISTED = 5
_EXAMPLE = "for example net.py:Net or my_package.my_module:make_model"


def find_callable(source: str, use: str) -> Callable[..., Any]:
    """Return the function or class that ``source`` names, with the arguments it gives.

    Args:
        source: as above.
        use: which one is expected, for the message.

    Raises:
        UsageError: it is misspelt, cannot be imported, or is not there.
    """
    spelling = _SPELLING.fullmatch(source)
    if not spelling:
        raise UsageError(
            f"{source!r} is neither a file nor package.module:callable. Write a Python file or a "
            f"dotted module name, a colon and the name of a function or class, {_EXAMPLE}."
        )
    file, given = spelling["file"], spelling["arguments"]
    arguments, keywords = ((), {}) if given is None else _literals(source, given)
    module = spelling["module"]
    found: object = _import_file(source, Path(file)) if file else _import(source, module)
    for name in spelling["name"].split("."):
        if not hasattr(found, name):
            place = getattr(found, "__file__", None) or module
            raise UsageError(f"{source}: there is no {name!r} in {place}.{_defined(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{source} is a {type(found).__name__}, not a function. Name {use}.")
    return found if given is None else partial(found, *arguments, **keywords)


def without_arguments(source: str) -> str:
    """Return ``file:name`` of a source that also gives arguments."""
    spelling = _SPELLING.fullmatch(source)
    given = spelling and spelling["arguments"]
    return source.removesuffix(given) if given else source


def code_folders(source: str) -> list[str]:
    """Return the folders that the code which a source names is imported from."""
    spelling = _SPELLING.fullmatch(source)
    file = spelling and spelling["file"]
    return [str(_packages(Path(file))[0])] if file else [str(Path.cwd())]


def _packages(path: Path) -> tuple[Path, list[str]]:
    """Return the folder that a file is imported from, and its dotted name's parts."""
    folder, parts = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").exists():
        folder, parts = folder.parent, [folder.name, *parts]
    return folder, parts


def _literals(source: str, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the values between parentheses, which are read and not evaluated."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        values = tuple(map(ast.literal_eval, call.args))
        if len(named) != len(call.keywords) or ... in (*values, *named.values()):
            raise ValueError
        return values, named
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise UsageError(
            f"{source}: the arguments are not all literals. Write numbers, texts, lists or dicts, "
            "such as 'net.py:Net(dim=64, heads=4)'. For other values write a function without "
            "arguments that returns the module, and name that."
        ) from None


def _defined(module: Any) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f" Defined there: {', '.join(own)}." if own else " Nothing callable is defined there."


def _import_file(source: str, path: Path) -> ModuleType:
    """Import a file under the name that its packages give it, as others there import it."""
    if not path.is_file():
        near = sorted(str(one) for one in path.parent.glob("*.py"))[:_LISTED]
        there = f" Found {', '.join(near)}." if near else ""
        raise UsageError(
            f"{source}: there is no file {path}.{there} Check the name and the folder."
        )
    folder, parts = _packages(path)
    name, first = ".".join(parts), folder / parts[0] / "__init__.py"
    top = sys.modules.get(parts[0])
    if re.fullmatch(_NAME, name) and (top is None or _is_of(top, first if parts[1:] else path)):
        module = _import(source, name, folder)
        if _is_of(module, path):
            return module
    return _import_alone(source, path, folder)


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _import_alone(source: str, path: Path, folder: Path) -> ModuleType:
    """Import a file whose name another module has, or that is not a name in Python."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    run = partial(spec.loader.exec_module, module)
    try:
        _imported(source, name, run, folder)
    except UsageError:
        del sys.modules[name]
        raise
    return module


def _import(source: str, name: str, folder: Path | None = None) -> ModuleType:
    def run() -> ModuleType:
        return importlib.import_module(name)

    module: ModuleType = _imported(source, name, run, folder)
    return module


def _imported(source: str, name: str, run: Callable[[], Any], folder: Path | None) -> Any:
    """Return what an import gives, with a folder on Python's path: the current one if None.

    Raises:
        UsageError: it fails, with the line of the user's code.
    """
    place = folder or Path.cwd()
    try:
        with _on_path(place), user_code(f"importing {name} failed", ImportError):
            return run()
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"{source}: no module named {error.name} on Python's path or in {place}. Give its "
                "file, such as folder/net.py:Net, or install its package."
            ) from error
        raise UsageError(
            f"{source}: importing {name} needs {error.name}, which is not installed. Install it "
            "in this environment."
        ) from error
    except ImportError as error:
        raise UsageError(f"{source}: importing {name} failed: {error}.") from error


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(str(folder))


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
