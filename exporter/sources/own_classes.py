"""Classes of the user's Python files, read as text: nothing in them is run.

    net.py  ->  class Net: its parts (qkv, out), the inputs of forward (x, mask)

With names and sizes from a file of weights they make the command that converts it.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_FILES, MOST_BYTES = 50, 2**20
"""Python files of a folder that are looked at, and bytes of each."""

FILE, NAME = "FILE.py", "CLASS"
"""Placeholders of a class that is not found."""

BATCH, LENGTH, WIDTH = 2, 16, 64
"""Sizes of examples; the last where no weight tells it."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class OwnClass:
    """A class with a forward.

    Attributes:
        file: in which it is.
        name: of the class.
        inputs: parameters of forward without a default.
        arguments: those of its constructor, as they may be written: "config=Config()".
        optional: masks among the parameters of forward with a default.
        parts: names that it assigns on itself, with what is called for their values: "Linear".
    """

    file: Path
    name: str
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    parts: Mapping[str, str]
    optional: tuple[str, ...] = ()


def classes_of(file: Path) -> list[OwnClass]:
    """Return the classes of a file that have a forward; none of one that cannot be read."""
    try:
        if file.stat().st_size > MOST_BYTES:
            return []
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    values = {node.name: _needed(node) for node in nodes if "forward" not in _methods(node)}
    return [_described(file, node, values) for node in nodes if "forward" in _methods(node)]


def weights_advice(file: Path, shapes: Shapes, class_name: str | None = None) -> str:
    """Return what to do with weights alone: the command that converts a module with them.

    Args:
        file: of the weights.
        shapes: of its tensors, by name.
        class_name: of the module, where the file says it.
    """
    shapes = _without_wrapper(shapes)
    found = _with_parts(_near(file), shapes, class_name)
    if found is None:
        name = (class_name or NAME).rpartition(".")[2]
        found = OwnClass(Path(FILE), name, ("x",), (), {})
    command = _command(_place(found), found, _width(shapes), ["--state-dict", str(file)], shapes)
    return (
        "name the class of your code that computes with these weights, which are then read as "
        f"data, and sizes of an example:{command}"
    )


_SHORT = {"cfg": "config", "conf": "config"}


def example_of(argument: str, annotation: str, classes: Mapping[str, Sequence[str]]) -> str:
    """Return how an argument may be written: ``config=Config()``, else ``width=...``.

    Args:
        argument: its name.
        annotation: name of its type, if any.
        classes: of the same file, that are no modules, with the arguments that each needs.
    """
    ending = _SHORT.get(argument, argument).capitalize()
    kinds = [name for name in classes if name == annotation]
    kinds += [name for name in classes if name.endswith(ending)]
    if not kinds:
        return f"{argument}=..."
    return f"{argument}={kinds[0]}({', '.join(f'{name}=...' for name in classes[kinds[0]])})"


def command_of(file: Path) -> str:
    """Return the command that converts the last class of a Python file, and what to check."""
    classes = classes_of(file)
    used = {kind for one in classes for kind in one.parts.values()}
    whole = [one for one in classes if one.name not in used] or classes
    if not whole:
        return f"\n  {shlex.join(['linexport', 'convert', f'{file}:FUNCTION'])}\nReplace FUNCTION"
    return _command(_place(whole[-1]), whole[-1], WIDTH, [], {})


def command_with_inputs(
    source: str, state_dict: str | Path | None, needed: Sequence[str], shapes: Shapes, kind: str
) -> str:
    """Return the command that converts a module, with an input for each parameter of forward.

    What to check in it is on a line after it.

    Args:
        source: as the user names the module.
        state_dict: file of its weights.
        needed: parameters without a default.
        shapes: of its weights.
        kind: class of the part that has the first of them.
    """
    first = next(iter(shapes), "").partition(".")[0]
    one = OwnClass(Path(), "", tuple(needed), (), {first: kind})
    options = [] if state_dict is None else ["--state-dict", str(state_dict)]
    return _command(source, one, _width(shapes), options, shapes)


def _near(file: Path) -> Iterator[OwnClass]:
    """Yield classes of the current folder, then of that of a file."""
    for folder in dict.fromkeys((Path(), file.parent)):
        for path in sorted(folder.glob("*.py"))[:MOST_FILES]:
            yield from classes_of(path)


def _with_parts(
    classes: Iterable[OwnClass], shapes: Shapes, class_name: str | None
) -> OwnClass | None:
    """Return the class of that name, else the one that has all parts of some weights.

    Of several it is the one with the fewest parts that have none.
    """
    first = {name.partition(".")[0] for name in shapes}
    last = (class_name or "").rpartition(".")[2]
    fitting = [
        one
        for one in classes
        if (one.name == last if class_name else first and first <= set(one.parts))
    ]
    return min(fitting, key=lambda one: len(one.parts), default=None)


def _without_wrapper(shapes: Shapes) -> Shapes:
    """Return shapes without what a wrapper puts before all names, ``module.`` or ``_orig_mod.``."""
    wrapped = ("module", "_orig_mod")
    while shapes and all(name.partition(".")[0] in wrapped for name in shapes):
        shapes = {name.partition(".")[2]: shape for name, shape in shapes.items()}
    return shapes


def _place(one: OwnClass) -> str:
    given = f"({', '.join(one.arguments)})" if one.arguments else ""
    return f"{one.file}:{one.name}{given}"


def _command(place: str, one: OwnClass, width: int, options: Sequence[str], shapes: Shapes) -> str:
    words = ["linexport", "convert", place, *options]
    for n, name in enumerate(one.inputs):
        words += ["--input", f"{name}={_example(name, n == 0 and _looks_up(one, shapes), width)}"]
    steps = [
        *(["fill in what is written as ..."] if "..." in place else []),
        *([f"replace {FILE}"] if place.startswith(FILE) else []),
        *([f"replace {NAME}"] if place.endswith(f":{NAME}") else []),
        *(["check the sizes (a guess)"] if one.inputs else []),
        *(
            f"add --input '{name}={_example(name, False, width)}' if you use it"
            for name in one.optional
        ),
    ]
    first, *more = steps or ["check the name"]
    advice = f"{', '.join([first, *more[:-1]])} and {more[-1]}" if more else first
    return f"\n  {shlex.join(words)}\n{advice[0].upper()}{advice[1:]}"


def _example(name: str, ids: bool, width: int) -> str:
    if "mask" in name:
        return f"bool[{BATCH},{LENGTH}]"
    if ids or name.endswith(("ids", "tokens")):
        return f"int64[{BATCH},{LENGTH}]"
    return f"float32[{BATCH},{LENGTH},{width}]"


def _looks_up(one: OwnClass, shapes: Shapes) -> bool:
    """Return whether the first weight, that of what comes first, is an embedding's."""
    first = next((name for name, shape in shapes.items() if len(shape) == 2), "")
    part = first.partition(".")[0]
    kind = one.parts.get(part)
    embeds = "emb" in first or part in ("wte", "tok")
    return kind == "Embedding" or (embeds and kind in (None, "ModuleDict", "Sequential"))


def _width(shapes: Shapes) -> int:
    """Return the columns of the first matrix among weights: what the first layer takes."""
    return next((shape[1] for shape in shapes.values() if len(shape) == 2), WIDTH)


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def _described(file: Path, node: ast.ClassDef, values: Mapping[str, Sequence[str]]) -> OwnClass:
    """Return a module's class; ``values`` are the other classes, and what each needs."""
    methods = _methods(node)
    arguments = _without_default(methods["__init__"]) if "__init__" in methods else []
    inputs = [one.arg for one in _without_default(methods["forward"])]
    optional = [name for name in _parameters(methods["forward"]) if name not in inputs]
    return OwnClass(
        file,
        node.name,
        tuple(inputs),
        tuple(example_of(one.arg, _annotation(one), values) for one in arguments),
        dict(_parts(node)),
        tuple(name for name in optional if "mask" in name),
    )


def _needed(node: ast.ClassDef) -> list[str]:
    """Return what a class is called with: its constructor's, or fields of a dataclass."""
    methods = _methods(node)
    if "__init__" in methods:
        return [one.arg for one in _without_default(methods["__init__"])]
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and one.value is None]
    return [one.target.id for one in fields if isinstance(one.target, ast.Name)]


def _annotation(argument: ast.arg) -> str:
    named = argument.annotation
    if isinstance(named, ast.Constant):
        return str(named.value)
    return ast.unparse(named) if named is not None else ""


def _parameters(function: ast.FunctionDef) -> list[str]:
    taken = function.args
    return [one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)][1:]


def _without_default(function: ast.FunctionDef) -> list[ast.arg]:
    taken = function.args
    plain = [*taken.posonlyargs, *taken.args]
    plain = plain[1 : len(plain) - len(taken.defaults)]
    named = [
        one for one, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is None
    ]
    return [*plain, *named]


def _parts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield what a class assigns on itself, and registers by name."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    yield target.attr, _called(inner.value)
        elif isinstance(inner, ast.Call) and _called(inner).startswith(("register_", "add_module")):
            name = inner.args[0] if inner.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, ""


def _called(value: ast.expr | None) -> str:
    """Return the last name of what an expression calls, such as Linear of nn.Linear(2, 3)."""
    function = value.func if isinstance(value, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
