"""Tables of measurements of linear forms, of attention and of feed-forward layers."""

from __future__ import annotations

from typing import Any

from pages import NONE, ms, table


def _loaded(result: Any) -> str:
    return f"One thread; load average of the machine: {result['load']:.1f}."


def digits(result: Any) -> str:
    """Accuracy of a classifier and of its linear forms."""
    rows = [
        [
            f"`{r['options']}`",
            *(f"{100 * r[key]:.1f} %" for key in ("softmax", "linear")),
            ", ".join(f"{error:.2g}" for error in r["errors"]),
        ]
        for r in result["rows"]
    ]
    told = "Accuracy is on 360 held-out images, of which one is 0.28 points."
    return (
        f"{table(['options', 'softmax', 'linear form', 'error of the two layers'], rows)}\n\n{told}"
    )


def memory(result: Any) -> str:
    """Time of pseudo-keys in place of stored images."""
    titles = ["queries", "linear form, ONNX, ms", "original, ONNX, ms", "original, PyTorch, ms"]
    titles += ["gain, one thread", "gain, two threads"]
    times = ("linear_ms", "onnx_ms", "pytorch_ms")
    rows = [
        [
            f"{r['queries']:,}",
            *(f"{r[key]:.3g}" for key in times),
            *(f"{r[key]:.1f}" for key in ("gain_1", "gain_2")),
        ]
        for r in result["rows"]
    ]
    layer, (before, after) = result["layer"], result["accuracy"]
    told = (
        f"{layer['pseudo_keys']:,} pseudo-keys in place of {layer['keys']:,} stored images: output "
        f"error {layer['held_out_error']:.3g} on held-out queries, where the mean of the values "
        f"has {layer['mean_of_values_error']:.3g}; accuracy on held-out images "
        f"{100 * before:.1f} % before and {100 * after:.1f} % after. Gains are over the "
        "faster of the two originals."
    )
    return f"{table(titles, rows)}\n\n{told}"


def verdicts(result: Any) -> str:
    """Verdicts on trained layers, beside errors on rows that they never saw."""
    titles = ["noise", "factor", "sharpness", "verdict", "error", "all keys alike", "margin"]
    titles += [f"{title}, other rows" for title in titles[4:]]
    rows = [
        [
            f"{r['noise']:g}",
            f"{r['factor']:g}",
            f"{r['sharpness']:.2f}",
            "linear" if r["replaced"] else "softmax",
            *_judged(r, ""),
            *_judged(r, "fresh_"),
            "yes" if r["agrees"] else "no",
        ]
        for r in result["rows"]
    ]
    return f"{_loaded(result)}\n\n{table([*titles, 'agree'], rows)}"


CHEAPEST = 6
"""Points of a grid that are shown."""


def search(result: Any) -> str:
    """A search beside the cheapest points chosen by hand."""
    best, grid = result["search"], result["grid"]
    titles = ["forms of the layers", "found by", "seconds of processor", "drop", "at most"]
    titles += ["ms of attention, 8,192 tokens", "bytes of states"]
    within = [one for one in grid if one["bound"] <= result["max_drop"]]
    cheap = sorted(within, key=lambda one: float(one["milliseconds"]))[:CHEAPEST]
    rows = [
        [
            ", ".join(f"`{form}`" for form in point["forms"]),
            by,
            f"{point['seconds']:.0f}",
            f"{point['drop']:.4f}",
            f"{point['bound']:.4f}",
            f"{point['milliseconds']:,.0f}",
            f"{point['state_bytes']:,}",
        ]
        for by, point in [("the search", best), *(("hand", one) for one in cheap)]
    ]
    costs = ("milliseconds", "state_bytes")
    better = sum(all(one[cost] < best[cost] for cost in costs) for one in within)
    told = (
        f"Drops are in bits per token, on text that nothing was fitted to; {result['max_drop']:g} "
        f"was allowed. {len(within)} of {len(grid)} points by hand are within that, of which the "
        f"cheapest are here; {better} of them cost less than the search's in time and bytes. All "
        f"points by hand took {sum(one['seconds'] for one in grid):,.0f} s."
    )
    return f"{_loaded(result)}\n\n{table(titles, rows)}\n\n{told}"


def text(result: Any) -> str:
    """A language model, more and more of whose layers are linear."""
    points = list(result["points"].values())
    softmax = next(point["bits"] for point in points if not point["linear"])
    titles = ["linear layers", "bits per byte", "lost", "needles found"]
    titles += [f"prompt of {int(n):,}, ms" for n in points[0]["prefill"]]
    titles += [f"a token after {int(n):,}, ms" for n in points[0]["step"]]
    titles += ["bytes of all states", "of keys and values replaced"]
    rows = [
        [
            str(len(point["linear"])),
            f"{point['bits']:.4f}",
            f"{point['bits'] - softmax:.4f}",
            ", ".join(f"{100 * share:.0f} %" for share in point["recall"].values()),
            *(ms(time) for time in (*point["prefill"].values(), *point["step"].values())),
            f"{point['state_bytes']:,}",
            NONE if point["replaced_bytes"] is None else f"{100 * point['replaced_bytes']:.2g} %",
        ]
        for point in points
    ]
    lengths = ", ".join(f"{int(n):,}" for n in points[0]["recall"])
    rows_, width = result["data"]
    told = (
        f"Trained for {result['steps']:,} steps, {result['tokens'] / 1e6:.1f} M tokens; linear "
        f"forms distilled for {result['distil']} steps at most, on {rows_} rows of {width:,} "
        f"tokens. Bits are of {result['rows']} rows of 2,048 tokens, needles of {result['rows']} "
        f"rows of each length: {lengths}."
    )
    return f"{_loaded(result)}\n\n{table(titles, rows)}\n\n{told}"


def _judged(row: Any, rows: str) -> list[str]:
    """Both errors, and by how many standard errors the form's is the smaller."""
    errors = [f"{row[f'{rows}{key}']:.3f}" for key in ("error", "uniform_error")]
    return [*errors, f"{row[f'{rows}margin']:.1f}"]


def feed_forward(result: Any) -> str:
    """Feed-forward layers as parts of the block they replace."""
    rows = []
    for r in result["rows"]:
        width, inside, out = (f"{size:,}" for size in r["sizes"])
        form = f"`{r['form']}`, degree {r['degree']}"
        if r["rank"] is not None:
            form = f"`{r['form']}`, rank {r['rank']}{'' if r['chosen'] else ', `max_cost` lower'}"
        rows.append(
            [
                form,
                f"{width} → {inside} → {out}",
                f"{r['relative_error']:.2g}",
                f"{r['multiply_adds']:.2g}",
                ", ".join(f"{factor:.2g}" for factor in r["times"].values()),
            ]
        )
    titles = ["form", "inputs → inside → outputs", "error", "multiply-adds"]
    return f"{_loaded(result)}\n\n{table([*titles, 'time of 1, 64, 1,024 rows'], rows)}"
