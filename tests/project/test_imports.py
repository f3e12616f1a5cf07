"""Stages import in one direction only, from nothing to the command line."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"linexport.models": "models", "linexport.plugins": "plugins", "linexport": "exporter"}

ORDER = [
    # The package itself: its version, and names that are imported when they are first used.
    {"linexport"},
    {"option_names"},
    {"errors"},
    {"system"},
    {"manifest"},
    {"plugins"},
    {"models"},
    {"graph"},
    {"patches"},
    {"sources"},
    {"trace.loops"},
    {"trace"},
    {"match"},
    {"match.forms", "match.proof"},
    {"match.roles"},
    {"match.emit"},
    {"match.search"},
    {"loops"},
    {"token_flow"},
    {"passes"},
    {"targets"},
    {"artifact"},
    {"parity"},
    {"timing"},
    {"report"},
    {"quantization"},
    {"conversion"},
    {"ci", "debugging", "inspection", "maps", "linearization", "package", "planning", "serving"},
    {"cli", "testing"},
    {"__main__"},
]
"""Each may import those above it; those of one line do not import each other."""

RANK = {part: rank for rank, line in enumerate(ORDER) for part in line}

ALLOWED = {
    "report": {"errors", "system", "manifest", "plugins"},
    "manifest": {"option_names", "errors"},
}
"""Parts that a part may import, where that is less than all above it."""


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()


def imports(name: str, text: str) -> set[str]:
    """Modules of linexport that a module imports, in functions and for types too."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {n if n in MODULES else base for n in names}
    return {n for n in found if n == "linexport" or n.startswith("linexport.")}


@cache
def imports_of(name: str) -> set[str]:
    """The imports of a module as it is, parsed once for all tests."""
    return imports(name, MODULES[name].read_text())


def part(name: str) -> str:
    """The room a module belongs to: that within another where it has a place of its own."""
    steps = name.split(".")[1:] or [name]
    inner = ".".join(steps[:2])
    return inner if inner in RANK else steps[0]


def backward(name: str, imported: set[str]) -> list[str]:
    """Its imports that the order does not allow."""
    own = part(name)
    found = []
    for other in sorted(imported):
        there = part(other)
        if there == own:
            continue
        if RANK[there] >= RANK[own] or there not in ALLOWED.get(own, RANK):
            found.append(other)
    return found


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part(name) for name in MODULES} == set(RANK)


@pytest.mark.parametrize("name", [n for n in MODULES if n != "linexport"])
def test_no_import_goes_backwards(name: str) -> None:
    assert backward(name, imports_of(name)) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("trace.graph", "from linexport.passes import run", ["linexport.passes"]),
        (
            "trace",
            "def f():\n    from linexport.conversion import pipeline",
            ["linexport.conversion.pipeline"],
        ),
        ("trace.graph", "from ..cli.errors import guarded", ["linexport.cli.errors"]),
        ("graph.states", "import linexport.passes", ["linexport.passes"]),
        ("report.page", "import linexport.graph.dims", ["linexport.graph.dims"]),
        ("trace.graph", "from . import names\nimport os", []),
    ],
)
def test_a_backward_import_is_found(name: str, text: str, found: list[str]) -> None:
    name = f"linexport.{name}"
    assert backward(name, imports(name, text)) == found


def test_the_package_names_only_what_it_imports_late() -> None:
    """Its imports are for type checkers; at run time there are none."""
    tree = ast.parse(MODULES["linexport"].read_text())
    direct = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert {n.module for n in direct if isinstance(n, ast.ImportFrom)} == {"__future__"}


def test_there_are_no_cycles() -> None:
    graph = {
        name: imports_of(name) - {name, "linexport"} for name in MODULES if name != "linexport"
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_public_class_name_means_two_things() -> None:
    places: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            places.setdefault(name, set()).add(module)
    doubtful = {name: found for name, found in places.items() if len(found) > 1}
    # Text in strings may look like a class: those few modules are parsed.
    classes = {module: classes_of(module) for found in doubtful.values() for module in found}
    named = {name: [m for m in found if name in classes[m]] for name, found in doubtful.items()}
    assert {name: found for name, found in named.items() if len(found) > 1} == {}


def classes_of(name: str) -> set[str]:
    tree = ast.parse(MODULES[name].read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
