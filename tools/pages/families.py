"""The table of model families: from the patches, the layouts and the models that tests convert."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pages import NONE, ROOT, table
from pages.measured import record, with_circumstances

sys.path.insert(0, str(ROOT))

KINDS = {
    "gated_delta": "gated delta rule",
    "mamba2": "Mamba2",
    "mamba1": "Mamba",
    "lightning": "lightning attention",
    "mlstm": "mLSTM (xLSTM)",
    "rwkv4": "RWKV-4",
    "rg_lru": "RG-LRU (Griffin)",
    "causal_conv": "short convolution",
    "dynamic_conv": "short convolution",
    "compressed_conv": "short convolution",
    "indexers": "attention to tokens that an indexer chooses, in models with linear layers",
}
"""Recurrence that a patch's module computes, in the order of the table; several may share one."""


def _transformers() -> Iterator[list[str]]:
    """Yield a row for each recurrence: its name, its model types, how many were converted."""
    from linexport.patches import patches
    from tests.support.families import BASES, LINEAR_LAYERS

    tested = {name.removesuffix("_text") for name in (*LINEAR_LAYERS, *BASES)}
    by_module = {p.swaps[0].replacement.__module__.rpartition(".")[2]: p for p in patches()}
    for kind in dict.fromkeys(KINDS.values()):
        found = [by_module[module] for module, named in KINDS.items() if named == kind]
        names = {name for patch in found for name in patch.families}
        untested = names - tested
        if untested:
            raise ValueError(f"no test converts {sorted(untested)}")
        functions = sorted(s.name for patch in found for s in patch.swaps)
        yield [kind, _code(sorted(names)), _code(functions)]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def families() -> str:
    """Return the table of families, those of flash-linear-attention in its last row."""
    from linexport.models.flash_linear_attention import layouts

    rows = [[kind, names] for kind, names, _ in _transformers()]
    rows.append(["flash-linear-attention checkpoints", _code(sorted(layouts()))])
    return table(["recurrence", "model types"], rows)


def patched_functions() -> str:
    """Return the table of the functions that are replaced while a model is traced."""
    from linexport.patches import patches

    rows = [[kind, functions] for kind, _, functions in _transformers()]
    tried = sorted({str(patch.tried) for patch in patches()})
    return (
        table(["recurrence", "functions replaced"], rows) + f"\n\nTried with {' and '.join(tried)}."
    )


def model_types() -> str:
    """Return what became of a tiny model of each type, as tools/count_model_types.py found it."""
    found = record("model_types")
    rows = []
    for row in found["result"]["rows"]:
        fused = ", ".join(f"{count} `{op}`" for op, count in row.get("fused", {}).items())
        error = f"{row['error']:.1e}" if "error" in row else NONE
        streams = {True: "yes", False: "no"}.get(row.get("streams"), NONE)
        inputs = row["inputs"] if row["status"] != "refused" else "refused"
        rows.append([f"`{row['model_type']}`", inputs, fused or NONE, streams, error])
    titles = ["model type", "converted for", "fused", "streams", "largest relative error"]
    return with_circumstances(found, table(titles, rows))


PARTS = {
    "families": families,
    "patched-functions": patched_functions,
    "model-types": model_types,
}
