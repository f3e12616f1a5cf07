"""Loops in the middle of functions of a model's own -> functions of the variables they read.

    while s < T:                                       a, b = loop(T, a, b, s)
        b = b + a * F.pad(b, (0, 0, s, 0))[:, :T]  ->
        a, s = a * F.pad(a, ...)[:, :T], 2 * s

A tree scan is found where it is a function, see ``own_scans``. While a model is looked at and
traced, its functions run as they were written, with each outermost loop in a function of its own.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType

LOOPS = (ast.For, ast.While)

LEAVING = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete)
"""Statements and expressions that a loop cannot take to another function."""


@contextmanager
def loops_as_functions(functions: Iterable[FunctionType]) -> Iterator[None]:
    """Run functions with their loops in functions of their own; all are restored."""
    changed: list[tuple[FunctionType, CodeType, Collection[str]]] = []
    try:
        for function in functions:
            found = _rewritten(function)
            if found is None or found.helpers.keys() & function.__globals__.keys():
                continue
            for name, code in found.helpers.items():
                function.__globals__[name] = FunctionType(code, function.__globals__, name)
            changed.append((function, function.__code__, found.helpers))
            function.__code__ = found.code
        yield
    finally:
        for function, code, names in changed:
            function.__code__ = code
            for name in names:
                del function.__globals__[name]


@dataclass(frozen=True)
class _Rewritten:
    """The code of a function, and that of its loops by name."""

    code: CodeType
    helpers: dict[str, CodeType]


def _rewritten(function: FunctionType) -> _Rewritten | None:
    """Return the code of a function without its loops; None where it has none that may leave."""
    original = function.__code__
    special = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if original.co_freevars or original.co_cellvars or original.co_flags & special:
        return None
    try:
        source = textwrap.dedent(inspect.getsource(original))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef) or _has_private_names(tree):
        return None
    own = {*original.co_varnames}
    lifting = _Lifting(tree, f"loop_of_{tree.name}_{original.co_firstlineno}", own)
    tree = lifting.visit(tree)
    if not lifting.made:
        return None
    tree.decorator_list = []
    whole = ast.fix_missing_locations(ast.Module([*lifting.made, tree], []))
    ast.increment_lineno(whole, original.co_firstlineno - 1)
    made = compile(whole, original.co_filename, "exec", dont_inherit=True).co_consts
    codes = {code.co_name: code for code in made if isinstance(code, CodeType)}
    return _Rewritten(codes.pop(tree.name), {f.name: codes[f.name] for f in lifting.made})


def _has_private_names(tree: ast.AST) -> bool:
    """Return whether names mean others within a class, as ``self.__x`` does."""
    names = (getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(tree))
    return any(name.startswith("__") and not name.endswith("__") for name in names)


class _Lifting(ast.NodeTransformer):
    """Replaces outermost loops of a function by calls.

    Args:
        function: its source.
        name: beginning of the names of what is made.
        variables: of the function.

    Attributes:
        made: a function for each.
    """

    def __init__(self, function: ast.FunctionDef, name: str, variables: Collection[str]) -> None:
        self.function, self.name, self.variables = function, name, {*variables}
        self.made: list[ast.FunctionDef] = []

    def visit_For(self, node: ast.For) -> ast.stmt:
        """Replace a loop over something."""
        return self._lifted(node)

    def visit_While(self, node: ast.While) -> ast.stmt:
        """Replace a loop with a condition."""
        return self._lifted(node)

    def _lifted(self, node: ast.For | ast.While) -> ast.stmt:
        inside = list(ast.walk(node))
        if any(isinstance(n, LEAVING) or _is_kept(n) for n in inside):
            return node
        given, _ = _names(n for n in ast.walk(self.function) if _line(n) < node.lineno)
        before = given | {a.arg for a in ast.walk(self.function.args) if isinstance(a, ast.arg)}
        stored, _ = _names(inside)
        sizes = _Sizes(before - stored)
        body = sizes.visit(copy.deepcopy(node))
        _, loaded = _names(ast.walk(body))
        end = node.end_lineno or node.lineno
        _, after = _names(n for n in ast.walk(self.function) if _line(n) > end)
        results = sorted(stored & after)
        unknown = (loaded & self.variables) - before - stored
        if not results or not {*results} <= before or unknown:
            return node  # what it gives or reads may not be there, or is read in an outer loop
        name = f"{self.name}_{len(self.made)}"
        read = {n: n for n in sorted((loaded | {*results}) & before)} | sizes.found
        values = ", ".join(results)
        shell = f"def {name}({', '.join(read)}):\n    return ({values},)"
        call = f"({values},) = {name}({', '.join(read.values())})"
        (helper,), (statement,) = ast.parse(shell).body, ast.parse(call).body
        assert isinstance(helper, ast.FunctionDef)
        helper.body.insert(0, body)
        self.made.append(helper)
        return ast.copy_location(statement, node)


class _Sizes(ast.NodeTransformer):
    """Replaces sizes of tensors by variables, for which a loop need not be given the tensors.

    Attributes:
        found: the expression of each variable.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.found: dict[str, str] = {}

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Replace ``x.shape[1]``."""
        return self._replaced(node, node.value, "shape", node.slice)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace ``x.size(1)``."""
        return self._replaced(node, node.func, "size", *node.args)

    def _replaced(self, node: ast.expr, of: ast.expr, attribute: str, *place: ast.expr) -> ast.expr:
        constant = len(place) == 1 and isinstance(place[0], ast.Constant | ast.UnaryOp)
        base = of.value if isinstance(of, ast.Attribute) and of.attr == attribute else None
        if constant and isinstance(base, ast.Name) and base.id in self.names:
            name = f"size_{len(self.found)}_of_{base.id}"
            self.found[name] = ast.unparse(node)
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        self.generic_visit(node)
        return node


def _is_kept(node: ast.AST) -> bool:
    """Return whether a loop writes what outlives it: it is run several times to be looked at."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _names(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the variables that are written, be it in part, and those that are read."""
    stored, loaded = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            base: ast.expr = node
            while isinstance(base, ast.Subscript | ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                stored.add(base.id)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            loaded.add(node.target.id)
        if isinstance(node, ast.alias):
            stored.add((node.asname or node.name).partition(".")[0])
    return stored, loaded
