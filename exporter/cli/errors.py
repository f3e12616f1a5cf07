"""Errors as messages and exit codes; with --json, nothing but JSON on standard output.

Exit codes: 0 done, 1 internal error, 2 usage, 3 parity or signature, 4 unsupported model,
5 environment, 6 build, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from functools import partial
from typing import TextIO

import typer

from linexport.cli.output import echo
from linexport.errors import (
    EnvironmentProblemError,
    LinexportError,
    StoppedAfterPass,
    TimeLimitError,
)
from linexport.option_names import shown_as_flags
from linexport.system import signals
from linexport.system.install import pip_install_here
from linexport.system.json_object import JsonObject
from linexport.system.room import FULL, MAKE_ROOM
from linexport.system.time_limit import limited

TRACEBACKS = "LINEXPORT_TRACEBACK"

ESSENTIAL = {
    "torch": "PyTorch",
    "onnxscript": "onnxscript",
    "onnx_graphsurgeon": "onnx-graphsurgeon",
    "jinja2": "Jinja2",
}
"""Modules that artifacts are opened and run without, by which an installation may be small."""

_stdout: ContextVar[TextIO | None] = ContextVar("stdout", default=None)
"""Where JSON goes. Whatever else is printed meanwhile, by the user's model say, goes elsewhere."""


@contextmanager
def guarded(json_output: bool) -> Iterator[None]:
    """Turn exceptions of a command into one message and an exit code."""
    with shown_as_flags():
        yield from _guarded(json_output)


def _guarded(json_output: bool) -> Iterator[None]:
    reset = _stdout.set(sys.stdout)
    try:
        signals.unwind()
        with redirect_stdout(sys.stderr) if json_output else nullcontext():
            yield
    except StoppedAfterPass as stopped:
        if json_output:
            print_json({"status": "stopped", "exit_code": 0, "message": str(stopped)})
        else:
            echo(str(stopped))
    except KeyboardInterrupt:
        _fail(*signals.interruption(), json_output)
    except (typer.Exit, SystemExit):
        raise
    except TimeLimitError as error:
        _fail(str(error), error.exit_code, json_output)
    except LinexportError as error:
        interrupted = signals.interruption() if signals.received() else None
        _fail(*(interrupted or (str(error), error.exit_code)), json_output)
    except BrokenPipeError:  # of a text without end: its reader has had enough
        raise typer.Exit from None
    except Exception as error:
        if signals.received():
            _fail(*signals.interruption(), json_output)
        if isinstance(error, OSError) and error.errno in FULL:
            place = error.filename or "a file"
            message = f"Cannot write {place}: {error.strerror}. {MAKE_ROOM}"
            _fail(message, EnvironmentProblemError.exit_code, json_output)
        if os.environ.get(TRACEBACKS):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in ESSENTIAL:
            _fail(
                f"This needs {ESSENTIAL[error.name]}, which is not installed. Run "
                f"{pip_install_here()}, which installs it.",
                EnvironmentProblemError.exit_code,
                json_output,
            )
        first = (str(error).strip() or "no message").splitlines()[0]
        if type(error).__module__.startswith("onnxruntime"):
            _fail(
                f"ONNX Runtime cannot run the model: {first}\nIt may need more memory than there "
                "is, or the model is not one that linexport wrote.",
                EnvironmentProblemError.exit_code,
                json_output,
            )
        from linexport.system.extensions import raised_in

        place = raised_in(error)
        blame = "This is a fault of linexport."
        if place is not None:
            blame = f"This is a fault of a package that extends linexport: {place}."
        _fail(
            f"Internal error: {type(error).__name__}: {first}\n{blame} Run again with "
            f"{TRACEBACKS}=1 to see where, and report it.",
            1,
            json_output,
        )
    finally:
        signals.ignore()
        _stdout.reset(reset)


@contextmanager
def guarded_in_time(json_output: bool, seconds: float) -> Iterator[None]:
    """Guard a command that runs models, each call of which may take so many seconds; 0: any."""
    with guarded(json_output), limited(seconds, partial(_end, json_output)):
        yield


def _end(json_output: bool, message: str) -> None:
    """End the process from another thread than that which runs a model, and cannot be ended."""
    try:
        _say(message, TimeLimitError.exit_code, json_output)
        sys.stdout.flush()
        for found in gc.get_objects():
            if isinstance(found, tempfile.TemporaryDirectory):
                found.cleanup()
    finally:
        os._exit(TimeLimitError.exit_code)


def _fail(message: str, code: int, json_output: bool) -> None:
    _say(message, code, json_output)
    raise typer.Exit(code)


def _say(message: str, code: int, json_output: bool) -> None:
    if json_output:
        print_error(message, code)
    else:
        echo("Error: ", fg="red", bold=True, err=True, nl=False)
        echo(message, err=True)


def print_error(message: str, code: int) -> None:
    """The object that stands for a result that could not be had."""
    print_json({"status": "error", "exit_code": code, "message": message})


def print_json(value: JsonObject) -> None:
    """One object on standard output: standard JSON."""
    from linexport.manifest import dumps

    stream = _stdout.get() or sys.stdout
    stream.write(dumps(value))
    stream.flush()
