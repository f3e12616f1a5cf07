"""``linexport maps`` and ``linexport maps compare``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.options import Json, Seed, Threads
from linexport.cli.progress import Spinner

if TYPE_CHECKING:
    from linexport.manifest.map_records import MapComparison

maps = typer.Typer(invoke_without_command=True, no_args_is_help=False)

Width = Annotated[int, typer.Option("--d", min=1, help="Head width M is counted for.")]


@maps.callback(invoke_without_command=True)
def table(context: typer.Context, d: Width = 64, json: Json = False) -> None:
    """List the feature maps with their properties; compare measures them."""
    if context.invoked_subcommand is not None:
        return
    with guarded(json):
        from linexport.maps import catalogue

        found = catalogue(d)
        if json:
            print_json({"d": d, "maps": [asdict(entry) for entry in found]})
        else:
            from rich.console import Console

            from linexport.report.map_comparison import print_catalogue

            print_catalogue(found, d, Console(highlight=False))


@maps.command()
def compare(
    d: Annotated[
        int | None,
        typer.Option("--d", help="Head width of random queries and keys: 64 unless given."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens.")] = 1024,
    features: Annotated[
        str, typer.Option(help="Numbers of features for the maps that have a choice.")
    ] = "64,128,256",
    data: Annotated[
        str | None,
        typer.Option(help="A model whose own queries and keys to use, as for convert."),
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Its arguments, in order, as .npz; random ones unless given."),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--maps", help="Names, such as favor+,taylor2; all unless given.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the charts and the numbers: a .html page, a .png picture, or a folder for "
            "both and a .json file.",
        ),
    ] = None,
    threads: Threads = 0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure maps: error beside softmax and theory, denominators, time and memory."""
    with guarded(json):
        from linexport.maps import compare_maps
        from linexport.maps.output_files import check_report_paths, write_comparison

        check_report_paths(output)
        result = compare_maps(
            d,
            length,
            _numbers(features),
            data=data,
            inputs=inputs,
            maps=None if only is None else _names(only),
            threads=threads,
            seed=seed,
            progress=Spinner(quiet=json),
        )
        written = write_comparison(result, output)
        if json:
            print_json(asdict(result))
        else:
            _print(result, written)


def _print(result: MapComparison, written: list[Path]) -> None:
    from rich.console import Console

    from linexport.report.map_comparison import print_comparison

    console = Console(highlight=False)
    print_comparison(result, console)
    for path in written:
        console.print(f"\nwritten  {path}", soft_wrap=True, markup=False)


def _numbers(text: str) -> list[int]:
    from linexport.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--features {text!r}: expected positive integers, such as 64,128,256.")
    return [int(part) for part in parts]


def _names(text: str) -> list[str]:
    from linexport.errors import UsageError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("--maps is empty: expected names, such as favor+,taylor2.")
    return parts


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(maps, name="maps")
