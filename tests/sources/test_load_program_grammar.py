"""The grammars of strings in exported programs: what torch writes passes, all else is refused."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import pytest
from torch._export.serde import schema

from linexport.errors import UnsupportedModelError
from linexport.sources.pt2.document import KEYS, VALUES
from linexport.sources.pt2.expressions import expression
from linexport.sources.pt2.guards import guard
from linexport.sources.pt2.operators import operator

S = "Symbol('s0', positive=True, integer=True)"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (expression, S),
        (expression, "Symbol('zuf3')"),
        (expression, f"Add(Mul(Integer(-1), {S}), Integer(4))"),
        (expression, f"Pow(Max(Integer(1), {S}), Rational(1, 2))"),
        (expression, f"PowByNatural(FloatPow({S}, Float('-0.5', precision=53)), Integer(2))"),
        (expression, f"And(StrictLessThan({S}, Integer(9)), Equality(Mod({S}, Integer(2)), 0))"),
        (expression, "((s0 + 7) // 8) % 2 ** 3 >= u1"),
        (expression, "oo"),
        (guard, "((L['x'].size()[1] + (((-1)*L['x'].size()[1]) % 4)) // 4) != 1"),
        (guard, "L['args'][0]['key'].stride()[0] == 8 and not L['n'] < 3"),
        (guard, "max(1, math.floor(L['x'].size()[0] / 2)) ** 2 <= inf"),
        (guard, "L['mode'] == 'train'"),
        (operator, "torch.ops.aten.add.Tensor"),
        (operator, "torch.ops.aten.__and__.Tensor"),
        (operator, "torch.ops.aten._assert_scalar.default"),
        (operator, "torch.ops.prims.convert_element_type.default"),
        (operator, "_operator.floordiv"),
        (operator, "torch.sym_max"),
    ],
)
def test_what_torch_writes_passes(check: Callable[[str], None], text: str) -> None:
    check(text)


EVIL = "__import__('os').system('true')"
BOTH = [EVIL, f"[{EVIL}]", f"({EVIL},)", f"{{{EVIL}}}", f"lambda: {EVIL}", f"(y := {EVIL})", "1;2",
        "f'{1}'", "[x for x in y]", "exec('1')", "eval('1')", "().__class__", "1 if 2 else 3", "",
        "*x", "x=1", "print(1)", "1\n+ 1", "1 # x", "'a' 'b'(1)",
        "9" * 30, "(" * 500, "a.b"]  # fmt: skip


@pytest.mark.parametrize("text", BOTH)
@pytest.mark.parametrize("check", [expression, guard])
def test_python_is_refused(check: Callable[[str], None], text: str) -> None:
    with pytest.raises(UnsupportedModelError):
        check(text)


@pytest.mark.parametrize(
    "text",
    [
        "'s0'", "Integer('1')", f"Integer('{EVIL[:20]}')".replace("'os", ""), "Symbol('os')",
        "Symbol(Symbol('s0'))", "Symbol('s0', positive='x')", "Symbol('s0', cls=1)", "Symbol()",
        "Float('1', dps=5)", "Float('x')", "Float(1)", "sympify('1')", "Lambda(1)", "N", "S0", "s",
        "factorial(9)", "s0.is_positive", "s0!", "Add(*s0)", "Add(x=1)", "Pow(1)", "s0(1)",
    ],
)  # fmt: skip
def test_unknown_expressions_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedModelError, match="symbolic expression"):
        expression(text)


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "Pow(Integer(9), Integer(999999))", "2**s0", "LShift(1, 99999)",
     "Pow(9, Pow(9, 9))", "Pow(Pow(Pow(9, 30), 30), 30)", "2**Float('1e99')", "2**-33",
     "FloatPow(Float('9.0'), Add(s0, 99999))"],
)  # fmt: skip
def test_numbers_that_explode_are_refused(text: str) -> None:
    """Before they are computed, which most of them could not be in the life of this machine."""
    with pytest.raises(UnsupportedModelError):
        expression(text)


@pytest.mark.parametrize(
    "text",
    ["L.x", "L['x'].__class__", "L['x'].size(1)", "L['x'].numpy()", "torch", "math",
     "math.pow(2, 9)", 'L["x"] == 1', "L['a\"b']", "9**9**9", "9**99", "9**L['x']", "max(1, key=2)",
     "open('x')",
     "L['__class__']", "os.system('x')", "L['x'].size", "(math.floor)(1)(2)"],
)  # fmt: skip
def test_unknown_guards_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedModelError, match="guard"):
        guard(text)


def schema_strings() -> set[tuple[str, str]]:
    """Fields of torch's schema, below a program or a table of weights, that hold strings."""
    found: set[tuple[str, str]] = set()
    seen: set[Any] = set()

    def visit(kind: Any, place: tuple[str, str]) -> None:
        if kind is str:
            found.add(place)
        for inner in typing.get_args(kind):
            visit(inner, place)
        if isinstance(kind, type) and kind.__module__ == schema.__name__ and kind not in seen:
            seen.add(kind)
            for name, hint in typing.get_type_hints(kind).items():
                visit(hint, (kind.__name__, name))

    visit(schema.ExportedProgram, ("", ""))
    visit(schema.PayloadConfig, ("", ""))
    return found


def test_every_string_of_torchs_schema_has_a_rule() -> None:
    """Fails when a new torch adds, renames or drops one: then look at what torch does with it."""
    with_identifier_keys_only = {
        ("Graph", "tensor_values"),
        ("Graph", "sym_int_values"),
        ("Graph", "sym_bool_values"),
        ("Graph", "sym_float_values"),
        ("Graph", "custom_obj_values"),
        ("Argument", "as_string_to_argument"),
        ("ExportedProgram", "opset_version"),
    }
    refused_whole = {("CustomObjArgument", "name"), ("CustomObjArgument", "class_fqn")}
    expected = set(VALUES) | set(KEYS) | with_identifier_keys_only | refused_whole
    assert schema_strings() == expected | {("InputToCustomObjSpec", "custom_obj_name")}
