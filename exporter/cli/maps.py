"""``linexport maps``, ``linexport maps compare`` and ``linexport maps choose``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import PanelGroup, add_command
from linexport.cli.options import Json, Seed, Threads
from linexport.cli.progress import Spinner
from linexport.manifest.options import Panel

if TYPE_CHECKING:
    from linexport.manifest.map_records import MapComparison

maps = typer.Typer(
    cls=PanelGroup,
    epilog="linexport maps\nlinexport maps --d 128\nlinexport maps compare --features 64,256",
    invoke_without_command=True,
    no_args_is_help=False,
)

Data = Annotated[
    str | None,
    typer.Option(
        help="A model with linear or softmax attention whose own queries and keys to use, as "
        "for convert.",
        rich_help_panel=Panel.INPUT,
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        help="Its arguments, in order, as .npz; random ones unless given.",
        rich_help_panel=Panel.INPUT,
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        "--maps",
        help="Names, such as favor+,taylor2; all unless given.",
        rich_help_panel=Panel.MAPS,
    ),
]
RandomWidth = Annotated[
    int | None,
    typer.Option(
        "--d",
        help="Head width of random queries and keys: 64 unless given.",
        rich_help_panel=Panel.INPUT,
    ),
]
Length = Annotated[int, typer.Option(help="Tokens.", rich_help_panel=Panel.INPUT)]
Width = Annotated[int, typer.Option("--d", min=1, help="Head width M is counted for.")]


@maps.callback(invoke_without_command=True)
def table(context: typer.Context, d: Width = 64, json: Json = False) -> None:
    """List the feature maps with their properties; compare measures them, choose plans."""
    if context.invoked_subcommand is not None:
        return
    with guarded(json):
        from linexport.maps import catalogue

        found = catalogue(d)
        if json:
            print_json({"d": d, "maps": [asdict(entry) for entry in found]})
        else:
            from linexport.report.map_comparison import print_catalogue
            from linexport.system.terminal import plain_console

            print_catalogue(found, d, plain_console(highlight=False))


def compare(
    d: RandomWidth = None,
    length: Length = 1024,
    features: Annotated[
        str,
        typer.Option(
            help="Numbers of features for the maps that have a choice.", rich_help_panel=Panel.MAPS
        ),
    ] = "64,128,256",
    data: Data = None,
    inputs: Inputs = None,
    only: Only = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the charts and the numbers: a .html page, a .png picture, or a folder for "
            "both and a .json file.",
            rich_help_panel=Panel.OUTPUT,
        ),
    ] = None,
    threads: Threads = 0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure maps: error against softmax and theory, denominators, time and memory."""
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


def choose(
    error: Annotated[
        float,
        typer.Option(
            help="Largest error, relative: of attention's output from softmax's, or of the kernel.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = 0.1,
    probability: Annotated[
        float,
        typer.Option(
            help="Probability of no larger error, over a map's random draws.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = 0.95,
    quantity: Annotated[
        str | None,
        typer.Option(
            "--of",
            help="What the error is of: output, that of attention, or kernel, root mean square "
            "over pairs of a query and a key.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--by",
            help="simulation draws each map until the probability is shown with a confidence of "
            "0.999; inequality (Markov's) bounds the kernel error by its variance, with many more "
            "features.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = "simulation",
    absolute: Annotated[
        bool,
        typer.Option(
            "--absolute", help="A kernel error is not relative.", rich_help_panel=Panel.COMMON
        ),
    ] = False,
    output_error: Annotated[
        float | None,
        typer.Option(
            help="Beside a kernel error, the largest measured error of the output: that of --error "
            "unless given.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    most_features: Annotated[
        int, typer.Option(help="Largest number of features.", rich_help_panel=Panel.MAPS)
    ] = 4096,
    d: RandomWidth = None,
    length: Length = 1024,
    data: Data = None,
    inputs: Inputs = None,
    only: Only = None,
    threads: Threads = 0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Plan the features of every map for an error with a probability; name the cheapest.

    How many features a map needs is found by drawing it many times; time and memory with so many
    are measured. Exits with 3 where no map fits.
    """
    with guarded(json):
        from linexport.errors import ParityError
        from linexport.maps import choose_map

        plan = choose_map(
            d,
            length,
            error=error,
            probability=probability,
            quantity=quantity,
            method=method,
            absolute=absolute,
            output_error=output_error,
            most_features=most_features,
            data=data,
            inputs=inputs,
            maps=None if only is None else _names(only),
            threads=threads,
            seed=seed,
            progress=Spinner(quiet=json),
        )
        if json:
            print_json(asdict(plan))
        else:
            from linexport.report.map_plan import print_plan
            from linexport.system.terminal import plain_console

            print_plan(plan, plain_console(highlight=False))
        if plan.chosen is None:
            raise typer.Exit(ParityError.exit_code)


def _print(result: MapComparison, written: list[Path]) -> None:
    from linexport.report.map_comparison import print_comparison
    from linexport.system.terminal import plain_console

    console = plain_console(highlight=False)
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
    add_command(
        maps,
        compare,
        "linexport maps compare",
        "linexport maps compare --maps favor+,taylor2 --features 64,256",
        "linexport maps compare --data model.pt --output maps.html",
    )
    add_command(
        maps,
        choose,
        "linexport maps choose --error 0.05 --probability 0.99",
        "linexport maps choose --of kernel --by inequality",
        "linexport maps choose --data model.pt --most-features 1024",
    )
    app.add_typer(maps, name="maps")
