"""``package.module:callable`` becomes a LoadedModel: the user's own function builds the model.

The function takes no arguments and returns ``(module, args)`` or ``(module, args,
dynamic_shapes)``, the last in torch.export's notation; without it `default_dims` chooses. Its
module is looked up on Python's path and in the current directory. This runs the user's code, as
asked; what it prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from linexport.errors import UsageError
from linexport.loaders.default_dims import default_dims, repeat_ones_where
from linexport.loaders.files import first_line
from linexport.loaders.hugging_face import adopt, is_language_model
from linexport.loaders.model import LoadedModel, Source
from linexport.loaders.weights import describe, named_tensors, non_finite_warnings

_SPELLING = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_RETURNS = "It must return (module, args) or (module, args, dynamic_shapes)"
_EXAMPLE = "for example my_package.my_module:make_model"


def load_factory(source: str, *, seed: int) -> LoadedModel:
    """Call the function that `source` names.

    Args:
        source: ``package.module:callable``.
        seed: of torch's generator while the function runs, so that its random weights and inputs
            are the same every time.

    Returns:
        The module in eval mode with its examples. Examples of size 1 in dims chosen here are
        repeated to 2, and a warning says so. A language model of transformers is taken as one,
        whatever its examples.

    Raises:
        UsageError: `source` is misspelt, cannot be imported, fails, or returns something else.
    """
    factory = _find(source)
    import torch

    with torch.random.fork_rng(devices=[]), _user_code(f"{source} failed"):
        torch.manual_seed(seed)
        result = factory()
    module, args, dynamic_shapes, warnings = _unpack(source, result)
    module.eval()
    origin = Source(
        kind="factory",
        location=source,
        sha256=None,
        description=describe(type(module).__name__, module),
    )
    if is_language_model(module):  # it says itself how it is called
        return adopt(module.float(), origin)
    return LoadedModel(
        module=module,
        args=args,
        kwargs={},
        dynamic_shapes=dynamic_shapes,
        source=origin,
        warnings=(*warnings, *non_finite_warnings(named_tensors(module))),
    )


def _find(source: str) -> Callable[[], Any]:
    spelling = _SPELLING.fullmatch(source)
    if not spelling:
        raise UsageError(
            f"{source!r} is neither a file nor package.module:callable. Write a dotted module "
            f"name, a colon and the name of a function, {_EXAMPLE}."
        )
    found: Any = _import(source, spelling["module"])
    for name in spelling["name"].split("."):
        if not hasattr(found, name):
            place = getattr(found, "__file__", None) or spelling["module"]
            raise UsageError(f"{source}: there is no {name!r} in {place}.{_functions(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(
            f"{source} is a {type(found).__name__}, not a function. Name a function without "
            "arguments that returns (module, args)."
        )
    return found


def _functions(module: Any) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f" Functions there: {', '.join(own)}." if own else " No functions are defined there."


def _import(source: str, name: str) -> ModuleType:
    try:
        with _current_directory_on_path(), _user_code(f"importing {name} failed", ImportError):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(
                f"{source}: no module named {error.name} on Python's path or in {Path.cwd()}. Run "
                f"in the folder that contains it, or install its package."
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
def _user_code(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn whatever the user's code raises into one line; its prints go to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        place = _user_line(error.__traceback__)
        raise UsageError(f"{what}{place}: {first_line(error)}. Fix it and run again.") from error


def _user_line(trace: TracebackType | None) -> str:
    """ " at file:line" of the innermost frame that is no installed library."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if Path(frame.filename) != Path(__file__)
        and not frame.filename.startswith("<")
        and Path(importlib.__file__).parent not in Path(frame.filename).parents
    ]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _unpack(source: str, result: Any) -> tuple[Any, tuple[Any, ...], Any, tuple[str, ...]]:
    """Check what the factory returned: module, args, dynamic_shapes, warnings."""
    import torch

    if not isinstance(result, tuple) or len(result) not in (2, 3):
        length = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise UsageError(f"{source} returned a {type(result).__name__}{length}. {_RETURNS}.")
    module, args = result[:2]
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"{source} returned a {type(module).__name__} as module. {_RETURNS}, where module is "
            "a torch.nn.Module; wrap a function in one."
        )
    if not isinstance(args, tuple):
        raise UsageError(
            f"{source} returned a {type(args).__name__} as args. {_RETURNS}, where args is a "
            "tuple; write (x,) for a single tensor."
        )
    if not any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(args)):
        raise UsageError(f"{source} returned args without a tensor. {_RETURNS}.")
    if len(result) == 2:
        default = default_dims(args)
        return module, default.args, default.dynamic_shapes, default.warnings
    shapes = result[2]
    if shapes is not None and not isinstance(shapes, tuple | list | dict):
        raise UsageError(
            f"{source} returned a {type(shapes).__name__} as dynamic_shapes. Expected one entry "
            "per argument, as torch.export.export takes, for example ({0: Dim.DYNAMIC},)."
        )
    if isinstance(shapes, tuple | list) and len(shapes) != len(args):
        raise UsageError(
            f"{source} returned {len(shapes)} entries of dynamic_shapes for {len(args)} arguments. "
            "Give one per argument, None where nothing varies."
        )
    # A dict names the arguments in the order of forward's parameters.
    spec = tuple(shapes.values()) if isinstance(shapes, dict) else shapes
    return module, repeat_ones_where(args, spec), shapes, ()
