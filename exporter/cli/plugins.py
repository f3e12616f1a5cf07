"""``linexport plugins``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.options import Json

plugins = typer.Typer(help="The TensorRT plugins as a library.", no_args_is_help=True)


@plugins.callback()
def group() -> None:
    """The TensorRT plugins as a library."""


@plugins.command()
def build(
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path(
        "liblinexport_tensorrt.so"
    ),
    include: Annotated[
        Path | None, typer.Option(help="Folder of TensorRT's NvInferRuntime.h.")
    ] = None,
    cuda_include: Annotated[Path | None, typer.Option(help="Folder of CUDA's cuda.h.")] = None,
    json: Json = False,
) -> None:
    """Compile them, for trtexec, C++ programs and Triton Inference Server."""
    with guarded(json):
        from linexport.plugins.tensorrt import library

        made = library.build_library(output, include, cuda_include)
        if json:
            print_json({"status": "ok", "library": str(made)})
        else:
            typer.echo(f"library  {made}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.add_typer(plugins, name="plugins")
