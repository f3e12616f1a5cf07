"""The command line: one command a file, found by scanning this folder.

A command module has ``register(app)``. Heavy libraries are imported inside commands, so that
``linexport --help`` answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer

from linexport.cli.verbosity import VerboseGroup, set_verbosity
from linexport.manifest.options import Panel

EXAMPLES = (
    "linexport inspect model.pt",
    "linexport convert model.pt --output model.artifact",
    "linexport generate model.artifact --prompt 'Once upon a time'",
)

app = typer.Typer(
    name="linexport",
    cls=VerboseGroup,
    epilog="\n".join(EXAMPLES),
    help="Convert PyTorch models with linear attention to checked, fast ONNX artifacts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            callback=set_verbosity,
            rich_help_panel=Panel.DEBUGGING,
            help="Show decisions; -vv also why others were not made.",
        ),
    ] = 0,
) -> None:
    """Options before any command."""
    if version:
        from linexport import __version__

        typer.echo(f"linexport {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
    _register = getattr(importlib.import_module(f"{__name__}.{_module.name}"), "register", None)
    if _register:
        _register(app)


def main() -> None:
    """Entry point of the ``linexport`` program."""
    if "--json" not in sys.argv[1:]:
        app()
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        # Options that do not parse: no command has run that could have answered in JSON.
        from linexport.cli.errors import print_error

        print_error(error.format_message(), error.exit_code)
        sys.exit(error.exit_code)
