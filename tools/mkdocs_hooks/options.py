"""The options of ``linexport.convert`` in its reference, which its source does not spell out.

Its signature and its docstring are completed from ``ConvertOptions`` when it is imported.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe

PATH = "linexport.conversion.pipeline.convert"


class Options(griffe.Extension):
    """Read the function as it is at run time."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace what was read from the source; called by griffe."""
        if func.path != PATH or func.docstring is None:
            return
        from linexport.conversion.pipeline import convert

        func.docstring.value = inspect.cleandoc(convert.__doc__ or "")
        func.parameters = griffe.Parameters(
            *map(_parameter, inspect.signature(convert).parameters.values())
        )


def _parameter(found: inspect.Parameter) -> griffe.Parameter:
    kind = griffe.ParameterKind[found.kind.name.lower()]
    default = None if found.default is inspect.Parameter.empty else repr(found.default)
    return griffe.Parameter(
        found.name, annotation=str(found.annotation), kind=kind, default=default
    )
