"""The types written for onnx-graphsurgeon, which has none, are those of the installed package."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

STUBS = Path(__file__).resolve().parents[2] / "tools" / "typings"
MODULES = {
    ".".join(path.relative_to(STUBS).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(STUBS.rglob("*.pyi"))
}


def functions(module: str, tree: ast.Module) -> Iterator[tuple[str, Callable[..., Any], list[str]]]:
    """Name, function of the package, and the parameters that its stub has."""
    place = importlib.import_module(module)
    for owner in tree.body:
        if isinstance(owner, ast.FunctionDef):
            yield owner.name, getattr(place, owner.name), _parameters(owner)
        for method in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and not _is_property(method):
                found = inspect.getattr_static(getattr(place, owner.name), method.name)
                yield (
                    f"{owner.name}.{method.name}",
                    getattr(found, "__func__", found),
                    _parameters(method),
                )


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def _is_property(function: ast.FunctionDef) -> bool:
    return any(
        "property" in name or "setter" in name for name in map(ast.unparse, function.decorator_list)
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_function_of_the_stub_has_these_parameters(module: str) -> None:
    for name, function, parameters in functions(module, ast.parse(MODULES[module].read_text())):
        known = inspect.signature(function).parameters
        takes_more = any(p.kind is p.VAR_KEYWORD for p in known.values())
        assert takes_more or set(parameters) <= set(known), name


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_stub_is_in_the_package(module: str) -> None:
    place = importlib.import_module(module)
    for node in ast.parse(MODULES[module].read_text()).body:
        if (
            isinstance(node, (ast.ClassDef, ast.FunctionDef))
            and module != "onnx_graphsurgeon.logger"
        ):
            assert hasattr(place, node.name), node.name
        if isinstance(node, ast.ImportFrom) and module == "onnx_graphsurgeon":
            assert all(hasattr(place, alias.name) for alias in node.names)


def instances() -> dict[str, object]:
    x, y = (gs.Variable(name, np.float32, [2]) for name in "xy")
    node = gs.Node("Relu", inputs=[x], outputs=[y])
    constant = gs.Constant("w", np.zeros(2, np.float32))
    return {
        "Variable": x,
        "Tensor": x,
        "Constant": constant,
        "Node": node,
        "Graph": gs.Graph([node]),
    }


@pytest.mark.parametrize("name", instances())
def test_every_attribute_of_the_stub_is_there(name: str) -> None:
    made = instances()[name]
    declared = [
        item
        for path in MODULES.values()
        for owner in ast.parse(path.read_text()).body
        if isinstance(owner, ast.ClassDef) and owner.name == name
        for item in owner.body
    ]
    attributes = [i.target.id for i in declared if isinstance(i, ast.AnnAssign)]
    attributes += [i.name for i in declared if isinstance(i, ast.FunctionDef)]
    assert attributes
    assert [a for a in attributes if not hasattr(made, a)] == []


def test_a_stub_that_is_wrong_is_found() -> None:
    wrong = ast.parse("class Node:\n    def copy(self, nothing: int) -> None: ...")
    ((_, function, parameters),) = functions("onnx_graphsurgeon.ir.node", wrong)
    assert not set(parameters) <= set(inspect.signature(function).parameters)
