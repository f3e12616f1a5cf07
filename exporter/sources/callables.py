"""``package.module:callable``: finding a function or class of the user's, and running it.

    package.module:make          a module on Python's path or in the current directory
    folder/net.py:Net            a file
    net.py:Net(dim=64, heads=4)  called with these arguments, which are literals,
    net.py:Net(Config(dim=64))   or names of the same module, which may be called likewise

This runs the user's code; what it prints goes to stderr.
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
from linexport.sources.compiled_extensions import compilation_failure
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
    call = None if given is None else _parsed(source, given)
    name = spelling["module"]
    module = _import_file(source, Path(file)) if file else _import(source, name)
    found = _named(source, module, spelling["name"])
    if not callable(found):
        raise UsageError(f"{source} is a {type(found).__name__}, not a function. Name {use}.")
    return found if call is None else _called(source, module, found, call)


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


class _Call(partial[Any]):
    """A call as it is written in a source. Calls among its arguments run when it does."""

    def __call__(self) -> Any:
        named = {name: _made(value) for name, value in self.keywords.items()}
        return self.func(*map(_made, self.args), **named)


def _made(value: object) -> object:
    return value() if isinstance(value, _Call) else value


def _parsed(source: str, text: str) -> ast.Call:
    """Return what stands between parentheses, which is read and not evaluated."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(source) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _unreadable(source)
    return call


def _called(source: str, module: ModuleType, found: Callable[..., Any], call: ast.Call) -> _Call:
    named = {word.arg: _value(source, module, word.value) for word in call.keywords if word.arg}
    if len(named) != len(call.keywords):
        raise _unreadable(source)
    return _Call(found, *(_value(source, module, one) for one in call.args), **named)


def _value(source: str, module: ModuleType, node: ast.expr) -> object:
    """Return an argument: a literal, or what a name of the module stands for."""
    written = node.func if isinstance(node, ast.Call) else node
    if not isinstance(written, ast.Name | ast.Attribute):
        try:
            value = ast.literal_eval(node)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise _unreadable(source) from None
        if value is ...:
            raise _unreadable(source)
        return value
    found = _named(source, module, ast.unparse(written))
    if not isinstance(node, ast.Call):
        return found
    if not callable(found):
        raise UsageError(f"{source}: {ast.unparse(written)} is not callable. Name a class.")
    return _called(source, module, found, node)


def _unreadable(source: str) -> UsageError:
    return UsageError(
        f"{source}: the arguments are not all literals. Write numbers, texts, lists or dicts, or "
        "names and classes of the same file, such as 'net.py:Net(dim=64, heads=4)' or "
        "'net.py:Net(Config(dim=64))'. For other values write a function without arguments that "
        "returns the module, and name that."
    )


def _named(source: str, module: ModuleType, name: str) -> object:
    """Return what a dotted name of a module stands for.

    Raises:
        UsageError: it is not there.
    """
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            place = getattr(found, "__file__", None) or getattr(found, "__name__", name)
            raise UsageError(f"{source}: there is no {part!r} in {place}.{_defined(found)}")
        found = getattr(found, part)
    return found


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
        UnsupportedModelError: it compiles an extension that cannot be compiled here.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        place = _user_line(error.__traceback__)
        compiled = compilation_failure(error, place)
        if compiled is not None:
            raise compiled from error
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
