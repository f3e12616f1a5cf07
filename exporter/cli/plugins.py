"""``linexport plugins``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import PanelGroup, add_command
from linexport.cli.options import Json
from linexport.cli.output import echo

plugins = typer.Typer(
    cls=PanelGroup,
    epilog="linexport plugins path cpu\nlinexport plugins path cuda\nlinexport plugins build",
    help="linexport's operators as libraries for other programs.",
    no_args_is_help=True,
)


@plugins.callback()
def group() -> None:
    """linexport's operators as libraries for other programs."""


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
    """Compile the TensorRT plugins, for trtexec, C++ programs and Triton Inference Server."""
    with guarded(json):
        from linexport.plugins.tensorrt import library

        made = library.build_library(output, include, cuda_include)
        if json:
            print_json({"status": "ok", "library": str(made)})
        else:
            echo(f"library  {made}")


class Library(enum.StrEnum):
    """Libraries that are built when linexport is installed."""

    CPU = "cpu"
    CUDA = "cuda"


def path(
    library: Annotated[Library, typer.Argument(help="Which one.")],
    json: Json = False,
) -> None:
    """Print the file of the operators for ONNX Runtime, which any program can register."""
    with guarded(json):
        from linexport.plugins.cpu import library as cpu
        from linexport.plugins.cuda import library as cuda

        found = {Library.CPU: cpu.path, Library.CUDA: cuda.path}[library]()
        if json:
            print_json({"status": "ok", "library": str(found)})
        else:
            echo(str(found))


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        plugins,
        build,
        "linexport plugins build",
        "linexport plugins build --output liblinexport.so --include TensorRT/include",
        "linexport plugins build --cuda-include /usr/local/cuda/include --json",
    )
    add_command(
        plugins,
        path,
        "linexport plugins path cpu",
        "linexport plugins path cuda",
        "linexport plugins path cpu --json",
    )
    app.add_typer(plugins, name="plugins")
