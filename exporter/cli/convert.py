"""``linexport convert``; its options are those of ``linexport.manifest.options``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.help import add_command
from linexport.cli.options import Json, convert_options, convert_parameters
from linexport.cli.progress import Spinner
from linexport.manifest.options import Panel

Source = Annotated[
    str,
    typer.Argument(
        help="A linexport checkpoint (.pt), an exported program (.pt2), an ONNX file, a "
        "Hugging Face model folder, a model folder of diffusers, an adapter folder of peft's, or "
        "code of yours: file.py:Class with --input and --state-dict, or package.module:function, "
        "which returns (module, args)."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="Folder to write the artifact to; by default NAME.artifact in the current one.",
        rich_help_panel=Panel.COMMON,
    ),
]


def convert(source: str, output: Path | None = None, json: bool = False, **given: Any) -> None:
    """Convert a model to a checked, measured artifact folder."""
    with guarded(json):
        from linexport.conversion import pipeline

        options = convert_options(given)
        manifest = pipeline.convert(source, output, **options, progress=Spinner(quiet=json))
        finish(manifest, Path(manifest.artifact), json)


def _signature() -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter("source", kind, annotation=Source),
        inspect.Parameter("output", kind, default=None, annotation=Output),
    ]
    json = inspect.Parameter("json", kind, default=False, annotation=Json)
    return inspect.Signature([*own, *convert_parameters(), json])


convert.__signature__ = _signature()  # type: ignore[attr-defined]


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        convert,
        "linexport convert model.pt",
        "linexport convert net.py:Net --state-dict w.pt --input 'x=float32[2,16,64]'",
        "linexport convert hugging_face_folder --weights int4 --max-kld 0.05",
    )
