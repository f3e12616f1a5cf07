"""``linexport inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import Inputs, Json, KeyOption, NewerThan, StandIns, StateDict, trust_of
from linexport.cli.output import echo
from linexport.errors import UsageError
from linexport.system.terminal import plain_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from linexport.manifest.inspected import (
        ArtifactInspection,
        FoundCandidate,
        OpRecord,
        SourceInspection,
    )
    from linexport.manifest.proof import TokenFlowRecord
    from linexport.manifest.records import KernelRecord, RangeRecord, SourceRecord, StateRecord
    from linexport.manifest.rewriting import RejectionRecord


def inspect(
    path: Annotated[str, typer.Argument(help="A source, as for convert, or an artifact folder.")],
    state_dict: StateDict = None,
    inputs: Inputs = None,
    stand_ins: StandIns = False,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that draws the graph around each match, before and after."),
    ] = None,
) -> None:
    """Show the linear attention that is found in a model or an artifact, and what nearly is."""
    with guarded(json):
        from linexport.artifact.write import check_apart
        from linexport.inspection import inspect as look

        if html is not None:
            check_apart(html, path)
        found = look(
            path,
            drawings=html is not None,
            trust=trust_of(key, newer_than),
            state_dict=state_dict,
            inputs=inputs or (),
            stand_ins=stand_ins,
        )
        if html is not None:
            _write(html, found)
        if json:
            print_json(found.to_json())
        else:
            _print(found)
            if html is not None:
                echo(f"\npage  {html}")


def _write(html: Path, found: SourceInspection | ArtifactInspection) -> None:
    from linexport.artifact.write import replace_text
    from linexport.manifest.inspected import ArtifactInspection
    from linexport.report import render_findings

    if isinstance(found, ArtifactInspection):
        raise UsageError(
            "--html draws what is found in a source; an artifact has its own report.html. Give "
            f"the model it was made from: {found.manifest.source.location}."
        )
    try:
        replace_text(html, render_findings(found))
    except OSError as error:
        raise UsageError(f"Cannot write {html}: {error.strerror}. Choose another place.") from None


def _print(found: SourceInspection | ArtifactInspection) -> None:
    from linexport.manifest.inspected import ArtifactInspection

    console = plain_console(highlight=False)
    if isinstance(found, ArtifactInspection):
        manifest = found.manifest
        _print_origin(console, "artifact", manifest.source, manifest.dims, vars(manifest.nodes))
        if manifest.failure:
            console.print(f"! The artifact {manifest.failure}.", style="yellow", markup=False)
        if manifest.quantisation is not None:
            from linexport.report import quantisation

            console.print(quantisation.summary(manifest.quantisation), markup=False)
        if manifest.packed is not None:
            ends = manifest.packed.ends
            console.print(f"packed batches: sequences side by side, their ends in {ends}")
        if manifest.not_built:
            console.print(
                f"! {manifest.not_built}. On the machine of the GPU: linexport build FOLDER",
                style="yellow",
                markup=False,
            )
        if manifest.mtp is not None:
            from linexport.report.verdict import predictor_check

            head = predictor_check(manifest.mtp)
            console.print(
                f"head for multi-token prediction: {head.word}, {head.detail}", markup=False
            )
        _print_kernels(manifest.kernels, console)
        if manifest.token_flow is not None:
            _print_flow(manifest.token_flow, console)
        _print_buffers(manifest.states, console)
        if manifest.placement is not None:
            console.print(f"compared where {manifest.placement.described()}", markup=False)
        _print_kept(manifest.kept_attention, console)
        _print_left(manifest.refused, console)
        lowerings = {op.node: found.lowering(op) for op in found.ops}
    else:
        nodes = {"traced": found.traced, "rewritten": found.rewritten}
        _print_origin(console, found.source.kind, found.source, found.dims, nodes)
        _print_kernels(found.kernels, console)
        _print_buffers(found.states, console)
        _print_findings(found, console)
        lowerings = None
    if found.ops:
        console.print()
        console.print(_table(found.ops, lowerings))
    elif lowerings is None:
        console.print("\nNo linear attention was found: the model would be exported as it is.")


def _print_origin(
    console: Console,
    kind: str,
    source: SourceRecord,
    dims: Mapping[str, RangeRecord],
    nodes: Mapping[str, int],
) -> None:
    place = source.location.replace("\n", "\\n")
    console.print(f"{source.description} ({kind}: {place})", markup=False)
    for name, limits in dims.items():
        high = limits.max if limits.max is not None else "any"
        steps = f", multiples of {limits.multiple}" if limits.multiple > 1 else ""
        console.print(f"dimension {name}: {limits.min} to {high}{steps}", markup=False)
    for what, count in nodes.items():
        console.print(f"nodes, {what}: {count}", markup=False)


def _print_findings(found: SourceInspection, console: Console) -> None:
    """Print warnings, the fused matches, and the rejected ones with their reasons."""
    from linexport.report.matches import facts, summary
    from linexport.report.text import grouped

    for warning in grouped(found.warnings):
        console.print(f"! {warning}", style="yellow", markup=False)
    for one in found.matches:
        console.print(f"\n✓ {summary(one.match)}, computes {one.match.where}", style="green")
        for name, fact in facts(one.match):
            console.print(f"  {name}: {fact}", markup=False)
    _print_left((*found.unmatched, *found.rejected), console)
    if found.token_flow is not None:
        console.print()
        _print_flow(found.token_flow, console)


def _print_flow(flow: TokenFlowRecord, console: Console) -> None:
    """Print what nodes do along the tokens, and those of them that look back or mix tokens."""
    from linexport.report import token_flow

    console.print(f"along the tokens: {token_flow.sentence(flow)}", markup=False)
    for node in flow.nodes:
        if node.kind == "window":
            rows = "all rows are kept" if node.rows is None else f"{node.rows} rows are kept"
            console.print(f"  {node.op} {node.node} looks back {node.reach}; {rows}", markup=False)
    if flow.mixing:
        reason = token_flow.reason(flow)
        console.print(f"Does not stream: {reason}", style="yellow", markup=False)


def _print_buffers(states: Iterable[StateRecord], console: Console) -> None:
    """Print the states that are buffers of the model, and whether rows of a batch share them."""
    from linexport.manifest.records import BUFFER

    for state in states:
        if state.op == BUFFER:
            shape = ", ".join(map(str, state.shape))
            console.print(f"state {state.past} ({shape}): {state.rows}", markup=False)


def _print_kernels(kernels: Sequence[KernelRecord], console: Console) -> None:
    from linexport.report.text import stood_in

    if kernels:
        console.print(f"stood in: {stood_in(kernels)}", markup=False)


def _print_kept(found: Iterable[RejectionRecord], console: Console) -> None:
    from linexport.report.text import KEPT

    for one in found:
        console.print(f"\n✓ {one.where} is kept: {KEPT}", markup=False)


def _print_left(found: Iterable[FoundCandidate | RejectionRecord], console: Console) -> None:
    for one in found:
        console.print(f"\n– {one.where} was left as it is", style="yellow", markup=False)
        console.print(f"  {one.reason}", markup=False)
        if one.line:
            console.print(f"  in {one.line}", markup=False)


def _table(ops: Iterable[OpRecord], lowerings: Mapping[str, str | None] | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("node", "op", "details", *(["lowering"] if lowerings is not None else [])):
        table.add_column(title, overflow="fold")
    for op in ops:
        row = [op.node, op.op, op.details]
        if lowerings is not None:
            row.append(str(lowerings[op.node]))
        table.add_row(*row)
    return table


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        inspect,
        "linexport inspect model.pt",
        "linexport inspect model.artifact --json",
        "linexport inspect package.module:make_model --html matches.html",
    )
