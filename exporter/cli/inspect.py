"""``linexport inspect``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from linexport.cli.guard import guarded, print_json
from linexport.cli.options import Json


def inspect(
    path: Annotated[str, typer.Argument(help="A source, as for convert, or an artifact folder.")],
    json: Json = False,
) -> None:
    """Show the linear attention that is found in a model or an artifact."""
    with guarded(json):
        from linexport.inspection import inspect as look

        found = look(path)
        if json:
            print_json(found)
        else:
            _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    source = found["source"]
    console.print(f"{source['description']} ({found['kind']}: {source['location']})", markup=False)
    for name, limits in found["dims"].items():
        high = limits["max"] if limits["max"] is not None else "any"
        console.print(f"dimension {name}: {limits['min']} to {high}", markup=False)
    for what, count in found["nodes"].items():
        if count is not None:
            console.print(f"nodes, {what}: {count}", markup=False)
    if not found["ops"]:
        console.print("No linexport op was found: the model would be exported as it is.")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("node", "op", "details", *(["lowering"] if found["kind"] == "artifact" else [])):
        table.add_column(title, overflow="fold")
    for op in found["ops"]:
        row = [op["node"], op["op"], _details(op)]
        if found["kind"] == "artifact":
            row.append(str(op["lowering"]))
        table.add_row(*row)
    console.print(table)


def _details(op: dict[str, Any]) -> str:
    if op["op"] == "FeatureMap":
        return f"{op['kind']}, {op['num_heads']} heads"
    if op["op"] == "GeneralizedDeltaRule":
        return f"{op['num_heads']} heads of {op['d_k']} x {op['d_v']}, token by token"
    if op["op"] != "LinearAttention":
        return f"activation {op.get('activation', 'none')}"
    heads = f"{op['q_num_heads']} query, {op['kv_num_heads']} key/value heads"
    parts = [
        "causal" if op.get("causal", 1) else "bidirectional",
        op.get("update_rule", "linear"),
        f"{heads} of {op['d_k']} x {op['d_v']}",
        f"normalised, eps {op.get('eps', 0.0):g}" if op.get("normalize") else "not normalised",
    ]
    return ", ".join(parts)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inspect)
