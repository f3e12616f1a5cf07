"""``linexport linearize``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import (
    Json,
    Lengths,
    LowerIsBetter,
    MaxDrop,
    Seed,
    Threads,
    completion,
    parse_lengths,
)
from linexport.cli.output import echo
from linexport.cli.progress import Spinner
from linexport.errors import ParityError, UsageError
from linexport.manifest.options import Panel
from linexport.system.json_object import JsonObject

if TYPE_CHECKING:
    from linexport.linearization import AutoSearch
    from linexport.manifest.linearization_records import LinearizationReport

PerLayer = (
    "NAME for every layer, or LAYER=NAME for those a pattern fits, such as blocks.0.*=taylor2"
)

FORMS = ("low-rank", "chebyshev", "least-squares", "bernstein", "taylor", "keep")
"""Linear forms of a feed-forward layer."""


def linearize(
    source: Annotated[
        str,
        typer.Argument(
            help="A trained model with softmax attention: a linexport checkpoint (.pt), an "
            "exported program (.pt2), a Hugging Face model folder or package.module:callable."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="File to write: .pt for linexport's stacks of layers, .pt2, an exported program, "
            "for other models.",
            rich_help_panel=Panel.COMMON,
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Calibration data, one row a sample: .npz with the model's arguments in order, or "
            "package.module:callable returning them.",
            rich_help_panel=Panel.COMMON,
        ),
    ],
    map: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Feature map: {PerLayer}. keep leaves softmax. favor+ unless given; may be "
            "repeated. With --auto, a candidate for every layer.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            help="Number of features M: M for every layer, or LAYER=M; may be repeated.",
            rich_help_panel=Panel.MAPS,
        ),
    ] = None,
    map_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Another option of the maps, NAME=VALUE; may be repeated.",
            rich_help_panel=Panel.MAPS,
        ),
    ] = None,
    locality: Annotated[
        float | None,
        typer.Option(
            help="Attend only to keys within this L1 distance; for heads of width <= 4.",
            rich_help_panel=Panel.MAPS,
        ),
    ] = None,
    memory_keys: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Pseudo-keys in place of keys that never change; one for each 16 if not.",
            rich_help_panel=Panel.MAPS,
        ),
    ] = None,
    feed_forward: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Linearise feed-forward layers, too: {', '.join(FORMS)}, or LAYER=FORM; may be "
            "repeated. low-rank suits layers that are narrow at both ends, chebyshev those of one "
            "to four inputs; the others cost more than the layer. The cost is printed first.",
            autocompletion=completion(lambda: FORMS),
            rich_help_panel=Panel.FEED_FORWARD,
        ),
    ] = None,
    target_error: Annotated[
        float | None,
        typer.Option(
            help="Expected squared error of such a layer for one token; chebyshev, bernstein and "
            "taylor need it.",
            rich_help_panel=Panel.FEED_FORWARD,
        ),
    ] = None,
    max_cost: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Multiply-adds for one token such a layer may have; ten million unless given.",
            rich_help_panel=Panel.FEED_FORWARD,
        ),
    ] = None,
    distil: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps of learning the original's layer outputs, at most.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = 0,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Search for each layer's form, a window and map, a map or the softmax kept: the "
            "cheapest in time and state whose score drops by no more than --max-drop.",
            rich_help_panel=Panel.SEARCH,
        ),
    ] = False,
    time_budget: Annotated[
        float | None,
        typer.Option(
            help="Minutes of the search, 10 unless given; confirming, timing and saving come after "
            "it. A search that was interrupted, or is given more, goes on where it was.",
            rich_help_panel=Panel.SEARCH,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Class of each row of --data, .npz or package.module:callable: the score of the "
            "search is then the share of right answers.",
            rich_help_panel=Panel.SEARCH,
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            help="package.module:evaluate, a score of a module, measured on the original and on "
            "its linear form. By default bits per token of a language model, and agreement with "
            "the original's classes of a classifier.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = None,
    lower_is_better: LowerIsBetter = False,
    max_drop: MaxDrop = None,
    bench: Annotated[
        bool, typer.Option(help="Measure latency and memory.", rich_help_panel=Panel.CHECKS)
    ] = True,
    lengths: Lengths = None,
    threads: Threads = 0,
    seed: Seed = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also replace attention by a form not better than the mean of its values, "
            "and take feed-forward layers that do not pay.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report with drawings.", rich_help_panel=Panel.OUTPUT),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace a file that is there.", rich_help_panel=Panel.COMMON
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Replace trained softmax attention by linear forms; exit 3 where it is not worth it.

    A layer whose linear form has no smaller error on held-out rows than the mean of its values
    keeps its softmax. Not worth it: no layer is left; the outputs are no nearer than with that
    mean; the linear form is not the faster one at the longest length measured; the score drops by
    more than --max-drop; or no feed-forward layer is faster than the one it replaces, or has fewer
    multiply-adds with --no-bench. The file is written in any case but the first.

    With --auto, bounds of the drop are on rows the search never saw, with a confidence of 95 %, and
    what was measured is kept in the folder OUTPUT.search.
    """
    with guarded(json):
        from linexport.artifact.write import check_apart
        from linexport.linearization import sources
        from linexport.linearization.pipeline import linearize as run
        from linexport.linearization.replace import rebuildable
        from linexport.linearization.save import check_checkpoint_path
        from linexport.models.config import from_text
        from linexport.models.feed_forward import MAX_COST
        from linexport.sources.metric import check_drop, find_metric

        search = _search(auto, time_budget, labels, output)
        if search is None:
            check_drop(evaluate, max_drop)
        metric = None if evaluate is None else find_metric(evaluate, lower_is_better)
        spinner = Spinner(quiet=json)
        with spinner.stage("load"):
            for written in filter(None, (output, html)):
                check_apart(written, source)
            rows = sources.rows(data)
            loaded = sources.source(source, seed, rows)
            check_checkpoint_path(output, rebuildable(loaded.module), overwrite)
        result = run(
            loaded,
            rows,
            map=map if search else _per_layer(map, str),
            features=_per_layer(features, _count),
            map_options=from_text(map_option or [], "tau=0.3"),
            locality=locality,
            memory_keys=memory_keys,
            feed_forward=_per_layer(feed_forward, str),
            target_error=target_error,
            max_cost=max_cost or MAX_COST,
            distil=distil,
            auto=search,
            evaluate=metric,
            max_drop=max_drop,
            bench=bench,
            lengths=parse_lengths(lengths),
            threads=threads,
            seed=seed,
            force=force,
            progress=spinner,
        )
        saved = str(output) if result.replaced else None
        if saved is not None:
            with spinner.stage("save"):
                result.save(output)
        _show(result.report, saved, html, json)
        if result.report.status != "ok":
            raise typer.Exit(ParityError.exit_code)


def _show(report: LinearizationReport, output: str | None, html: Path | None, json: bool) -> None:
    if html is not None:
        from linexport.artifact.write import replace_text
        from linexport.report.linearization import linearization_page

        try:
            replace_text(html, linearization_page(report))
        except OSError as error:
            raise UsageError(f"Cannot write {html}: {error.strerror}.") from None
    if json:
        print_json({**asdict(report), "output": output})
        return
    from linexport.report.linearization import print_linearization
    from linexport.system.terminal import plain_console

    print_linearization(report, plain_console(highlight=False), output)
    if html is not None:
        echo(f"page    {html}")


def _search(
    auto: bool, minutes: float | None, labels: str | None, output: Path
) -> AutoSearch | None:
    """Return the options of a search; None without one."""
    from linexport.linearization import sources
    from linexport.linearization.auto import AutoSearch

    if not auto:
        if minutes is not None or labels is not None:
            raise UsageError("--time-budget and --labels are of a search: add --auto.")
        return None
    found = AutoSearch(record=output.with_name(f"{output.name}.search"))
    if minutes is not None:
        found = replace(found, minutes=minutes)
    if labels is not None:
        given = sources.rows(labels, "labels")
        if len(given) != 1:
            raise UsageError(f"{labels} gives {len(given)} arrays; expected one of labels.")
        found = replace(found, labels=given[0])
    return found


def _per_layer(given: list[str] | None, read: Any) -> Any:
    """One value for all, or values by pattern."""
    found: JsonObject = {}
    for one in given or ():
        pattern, equals, value = one.rpartition("=")
        found[pattern if equals else "*"] = read(value)
    return found or None


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--features {text!r}: expected a positive integer, or LAYER=M.")
    return int(text)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        linearize,
        "linexport linearize model.pt -o linear.pt --data samples.npz --map taylor2",
        "linexport linearize model.pt2 -o linear.pt2 --data data:make --distil 500",
        "linexport linearize gpt2/ -o near.pt2 --data t.npz --auto --max-drop 0.02",
    )
