"""README's picture: milliseconds of one layer at one length, as bars.

Two files, for light and for dark pages: code hosts choose between them by the reader's setting.
"""

from __future__ import annotations

from pathlib import Path

from pages import ROOT
from pages.measured import record

LENGTH = 4096
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 800, 290, 80, 34, 58, 34
BARS = {
    "ort": ("linexport, target ort", True),
    "onnx": ("linexport, target onnx", True),
    "cumsum": ("cumulative sum, plain ONNX export", False),
    "masked_quadratic": ("masked scores, plain ONNX export", False),
    "softmax": ("softmax attention, ONNX Runtime", False),
}
"""Label of each bar, and whether it is linexport's."""

COLOURS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "own": "#3f51b5", "other": "#b4bac4"},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "own": "#8c9eff", "other": "#59606b"},
}


def pictures() -> dict[Path, str]:
    """Return both files by path."""
    folder = ROOT / "docs" / "images"
    return {folder / f"attention-{name}.svg": _svg(colours) for name, colours in COLOURS.items()}


def _svg(colours: dict[str, str]) -> str:
    found = record("attention")
    row = next(r for r in found["result"]["by_length"] if r["length"] == LENGTH)
    machine = found["environment"]
    largest = max(row["ms"][name] for name in BARS)
    height = TOP + ROW * len(BARS) + BOTTOM
    title = f"Causal linear attention, one layer, {LENGTH:,} tokens: milliseconds"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="15">',
        f"<title>{title}</title>",
        f'<text x="0" y="24" font-size="17" font-weight="600" fill="{colours["text"]}">'
        f"{title}</text>",
    ]
    for place, (name, (label, own)) in enumerate(BARS.items()):
        value = row["ms"][name]
        y = TOP + ROW * place
        length = max(2.0, (WIDTH - LEFT - RIGHT) * value / largest)
        lines += [
            f'<text x="{LEFT - 12}" y="{y + 17}" text-anchor="end" fill="{colours["text"]}"'
            f"{_weight(own)}>{label}</text>",
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="24" rx="3" '
            f'fill="{colours["own" if own else "other"]}"/>',
            f'<text x="{LEFT + length + 8:.1f}" y="{y + 17}" fill="{colours["text"]}"'
            f"{_weight(own)}>{value:g}</text>",
        ]
    caption = (
        f"H = 8, d = 64, float32; {machine['cores']} cores, {machine['cpu']}, ONNX Runtime "
        f"{machine['onnxruntime']}; {found['date']}"
    )
    lines.append(
        f'<text x="0" y="{height - 8}" font-size="12.5" fill="{colours["faint"]}">{caption}</text>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _weight(own: bool) -> str:
    return ' font-weight="600"' if own else ""
