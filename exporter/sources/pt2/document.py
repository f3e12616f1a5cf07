"""Every string of the program's JSON, checked by the field of torch's schema it stands in.

The JSON is turned into torch's own schema objects by torch's own function, which looks nothing up
and runs nothing, so that what is checked is what will be read. A string in a field without a rule
is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.sources.files import first_line
from linexport.sources.pt2.expressions import expression
from linexport.sources.pt2.guards import guard
from linexport.sources.pt2.operators import operator
from linexport.sources.pt2.source_strings import (
    identifier,
    identifier_or_empty,
    label,
    shorten,
    symbol,
    text,
)
from linexport.sources.pt2.treespecs import treespec

StringCheck = Callable[[str], None]


def device(name: str) -> None:
    """Programs are run on the CPU: it is the reference of every check."""
    if name not in ("cpu", "meta"):
        raise UnsupportedModelError(
            f"it is placed on {shorten(name)}; move it with "
            "torch.export.passes.move_to_device_pass(program, 'cpu') and save it again"
        )


VALUES: dict[tuple[str, str], StringCheck] = {
    ("Device", "type"): device,
    ("SymExpr", "expr_str"): expression,
    ("SymIntArgument", "as_name"): identifier,
    ("SymFloatArgument", "as_name"): identifier,
    ("SymBoolArgument", "as_name"): identifier,
    ("TensorArgument", "name"): identifier,
    ("TokenArgument", "name"): identifier,
    ("GraphArgument", "name"): identifier,
    ("Argument", "as_string"): text,
    ("Argument", "as_strings"): text,
    ("Argument", "as_operator"): operator,
    ("NamedArgument", "name"): identifier_or_empty,
    ("Node", "target"): operator,
    ("Node", "name"): identifier,
    ("Node", "metadata"): text,
    ("ConstantValue", "as_string"): label,
    ("InputToConstantInputSpec", "name"): identifier_or_empty,
    ("InputToParameterSpec", "parameter_name"): label,
    ("InputToBufferSpec", "buffer_name"): label,
    ("InputToTensorConstantSpec", "tensor_constant_name"): label,
    ("BufferMutationSpec", "buffer_name"): label,
    ("ParameterMutationSpec", "parameter_name"): label,
    ("GradientToParameterSpec", "parameter_name"): label,
    ("GradientToUserInputSpec", "user_input_name"): identifier,
    ("UserInputMutationSpec", "user_input_name"): identifier,
    ("ModuleCallSignature", "in_spec"): treespec,
    ("ModuleCallSignature", "out_spec"): treespec,
    ("ModuleCallSignature", "forward_arg_names"): identifier,
    ("ModuleCallEntry", "fqn"): label,
    ("NamedTupleDef", "field_names"): identifier,
    ("GraphModule", "metadata"): text,
    ("ExportedProgram", "verifiers"): identifier,
    ("ExportedProgram", "torch_version"): label,
    ("ExportedProgram", "guards_code"): guard,
    ("PayloadMeta", "path_name"): label,
}
KEYS: dict[tuple[str, str], StringCheck] = {
    ("ExportedProgram", "range_constraints"): symbol,
    ("GraphModule", "treespec_namedtuple_fields"): label,
    ("PayloadConfig", "config"): label,
}


def check_program(data: bytes) -> None:
    """Check the program's JSON.

    Raises:
        UnsupportedModelError: it is damaged, of another schema, or holds an unexpected string.
    """
    from linexport.system.torch_internals import files

    schema = files.schema()
    program = parse(schema.ExportedProgram, data, "program")
    version = program.schema_version.major
    if version != schema.SCHEMA_VERSION[0]:
        raise UnsupportedModelError(
            f"its schema version is {shorten(version)} (written by torch "
            f"{shorten(program.torch_version)}), this torch reads {schema.SCHEMA_VERSION[0]}; "
            "save it again with the torch installed here"
        )
    check_strings(program)
    for argument in program.graph_module.graph.inputs:
        if argument.type == "as_string":  # becomes part of a guard
            label(argument.as_string)


def parse(cls: type, data: bytes, what: str) -> Any:
    """JSON as an object of torch's schema.

    Raises:
        UnsupportedModelError: it does not fit the schema.
    """
    from linexport.system.torch_internals.files import PARSER

    read = PARSER.need()
    try:
        return read(cls, data)
    except Exception as error:  # malformed JSON fails in a dozen ways there
        raise UnsupportedModelError(f"its {what} is damaged ({first_line(error)})") from error


def check_strings(root: object) -> None:
    """Apply VALUES and KEYS to every string under a schema object.

    Raises:
        UnsupportedModelError: a string breaks its rule or has none.
    """
    try:
        for rule, place, value in _strings(root, ("", "")):
            if rule is None:
                raise UnsupportedModelError(f"it has text in {'.'.join(place)}: {shorten(value)}")
            rule(value)
    except (AttributeError, TypeError, RecursionError) as error:
        raise UnsupportedModelError(f"its program is damaged ({first_line(error)})") from error


def _strings(
    value: object, place: tuple[str, str]
) -> Iterator[tuple[StringCheck | None, tuple[str, str], str]]:
    if isinstance(value, str):
        yield VALUES.get(place), place, value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, place)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield KEYS.get(place, identifier), place, key
            yield from _strings(item, place)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        if kind == "CustomObjArgument":
            raise UnsupportedModelError("it carries a custom object")
        for field in dataclasses.fields(value):  # vars: getattr fails on unset union members
            yield from _strings(vars(value)[field.name], (kind, field.name))
    elif value is not None and not isinstance(value, bool | int | float):
        raise UnsupportedModelError(f"its program is damaged at {'.'.join(place)}")
