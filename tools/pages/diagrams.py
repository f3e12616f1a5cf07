"""Diagrams of the pages: boxes under each other, narrow as a phone, for light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pages import ROOT
from pages.picture import COLOURS

WIDTH, LINE, PADDING, GAP = 420, 19, 12, 26
QUESTION, ANSWER = 262, 112

STAGES = (
    ("Your model", "a module, a checkpoint, an exported", "program, ONNX, a Hugging Face folder"),
    ("Trace", "batch and length stay dynamic"),
    ("Match", "linear attention becomes one operator,", "if both compute the same on numbers"),
    ("Lower", "the operator in terms of your target"),
    ("Check", "compared with your model: lengths,", "batches, values, pieces of a stream"),
    ("Artifact", "model.onnx, manifest.json, report.html"),
)
QUESTIONS = (
    ("ONNX Runtime 1.31 or newer,", "on a CPU?", "ort", "(default)"),
    ("ONNX Runtime,", "on an NVIDIA GPU?", "ort-cuda"),
    ("A TensorRT engine?", "tensorrt", "tensorrt-rtx"),
    ("A runtime that has ONNX's own", "LinearAttention, of opset 27?", "onnx27"),
    ("Anything else: OpenVINO,", "a browser, a phone", "onnx"),
)
"""Questions from the top: lines of the question, then its targets, which are in ``TARGETS``."""

BEFORE = (
    ("MatMul, Add, Split",),
    ("Elu, Add", "for q and for k"),
    ("outer product k vᵀ", "of every token"),
    ("CumSum", "over all tokens"),
    ("product with q",),
    ("CumSum, product, sum", "the denominator"),
    ("Add, Div",),
)
AFTER = (("MatMul, Add, Split",), ("LinearAttention", "with map elu1"))
"""Nodes of the example of ``background/matching.md``, as exported and as converted."""

TARGETS = {"tensorrt", "tensorrt-rtx", "ort-cuda", "onnx27", "onnx", "ort", "(default)"}


@dataclass(frozen=True)
class Pen:
    """Elements of one picture in the colours of a page."""

    colours: dict[str, str]

    def text(self, x: float, y: float, words: str, *, bold: bool = False, own: bool = False) -> str:
        """Return words whose middle is at ``x``."""
        weight = ' font-weight="600"' if bold else ""
        colour = self.colours["own" if own else "text"]
        return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}"{weight}>{words}</text>'

    def box(self, x: float, y: float, width: float, height: float, *, own: bool = False) -> str:
        """Return a frame."""
        colour = self.colours["own" if own else "other"]
        return (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="none" '
            f'stroke="{colour}" stroke-width="{2 if own else 1.5}"/>'
        )

    def arrow(self, points: str, label: str = "", at: tuple[float, float] = (0, 0)) -> str:
        """Return a line with a head, and a word beside it."""
        faint = self.colours["faint"]
        word = f'<text x="{at[0]}" y="{at[1]}" font-size="13" fill="{faint}">{label}</text>'
        line = (
            f'<polyline points="{points}" fill="none" stroke="{faint}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )
        return line + (word if label else "")

    def page(self, title: str, height: float, elements: list[str]) -> str:
        """Return the whole picture."""
        faint = self.colours["faint"]
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{faint}"/>'
            "</marker></defs>"
        )
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="15">\n<title>{title}</title>'
        )
        return "\n".join([start, head, *elements, "</svg>"]) + "\n"


def diagrams() -> dict[Path, str]:
    """Return every file by path."""
    folder = ROOT / "docs" / "images"
    drawn = {
        "conversion": _conversion,
        "targets": _targets,
        "fused": _fused,
        "stream": _stream,
    }
    return {
        folder / f"{name}-{mode}.svg": draw(Pen(colours))
        for name, draw in drawn.items()
        for mode, colours in COLOURS.items()
    }


def _conversion(pen: Pen) -> str:
    elements, y = [], 4.0
    for place, (title, *lines) in enumerate(STAGES):
        height = 2 * PADDING + LINE * (1 + len(lines))
        if place:
            elements.append(pen.arrow(f"210,{y - GAP + 3} 210,{y - 2}"))
        own = place in (0, len(STAGES) - 1)
        elements.append(pen.box(40, y, WIDTH - 80, height, own=own))
        elements.append(pen.text(210, y + PADDING + 14, title, bold=True, own=own))
        for row, line in enumerate(lines, start=1):
            elements.append(pen.text(210, y + PADDING + 14 + LINE * row, line))
        y += height + GAP
    return pen.page("A conversion: from a model to an artifact", y - GAP + 4, elements)


def _targets(pen: Pen) -> str:
    elements, y = [pen.text(QUESTION / 2, 18, "What will run it?", bold=True)], 36.0
    for place, row in enumerate(QUESTIONS):
        question = [line for line in row if line not in TARGETS]
        answers = [line for line in row if line in TARGETS]
        height = 2 * PADDING + LINE * 2
        middle = y + height / 2
        elements.append(pen.box(2, y, QUESTION, height))
        elements += _centred(pen, QUESTION / 2 + 2, middle, question)
        last = place == len(QUESTIONS) - 1
        across = f"{QUESTION + 4},{middle} {WIDTH - ANSWER - 4},{middle}"
        elements.append(pen.arrow(across, "" if last else "yes", (QUESTION + 10, middle - 6)))
        elements.append(pen.box(WIDTH - ANSWER - 2, y, ANSWER, height, own=True))
        elements += _centred(pen, WIDTH - ANSWER / 2 - 2, middle, answers, own=True)
        if not last:
            down = f"{QUESTION / 2},{y + height + 2} {QUESTION / 2},{y + height + GAP - 2}"
            elements.append(pen.arrow(down, "no", (QUESTION / 2 + 8, y + height + 18)))
        y += height + GAP
    return pen.page("Questions that lead to a target", y - GAP + 4, elements)


def _fused(pen: Pen) -> str:
    left, right, width = 4, 226, 190
    elements = [
        pen.text(left + width / 2, 18, "as exported", bold=True),
        pen.text(right + width / 2, 18, "as converted", bold=True, own=True),
    ]
    y = _column(pen, elements, BEFORE, left, width)
    _column(pen, elements, AFTER, right, width, own=True)
    middle = 36.0 + (2 * PADDING + LINE * 2) * 1.5 + GAP
    under = middle + PADDING + LINE
    for place, name in enumerate(("past", "present")):
        x = right + 48 + 94 * place
        ends = (under + 46, under + 4) if name.startswith("past") else (under + 4, under + 46)
        elements.append(pen.arrow(f"{x},{ends[0]} {x},{ends[1]}"))
        elements.append(pen.text(x, under + 64, name))
    return pen.page("One layer of linear attention, before and after", y - GAP + 4, elements)


def _column(
    pen: Pen,
    elements: list[str],
    boxes: tuple[tuple[str, ...], ...],
    left: float,
    width: float,
    *,
    own: bool = False,
) -> float:
    """Add boxes under each other; return where the next would begin."""
    y, height = 36.0, 2 * PADDING + LINE * 2
    for place, lines in enumerate(boxes):
        last = own and place == len(boxes) - 1
        if place:
            x = left + width / 2
            elements.append(pen.arrow(f"{x},{y - GAP + 2} {x},{y - 2}"))
        elements.append(pen.box(left, y, width, height, own=last))
        elements += _centred(pen, left + width / 2, y + height / 2, list(lines), own=last)
        y += height + GAP
    return y


def _stream(pen: Pen) -> str:
    elements, width, height, y = [], 110, 58, 74
    steps = (("prompt", "logits"), ("a token", "logits"), ("a token", "logits"))
    for place, (given, got) in enumerate(steps):
        left = 4 + place * 151
        x = left + width / 2
        elements.append(pen.text(x, 22, given))
        elements.append(pen.arrow(f"{x},30 {x},{y - 2}"))
        elements.append(pen.box(left, y, width, height, own=True))
        elements += _centred(pen, x, y + height / 2, ["model.onnx"], own=True)
        elements.append(pen.arrow(f"{x},{y + height + 2} {x},{y + height + 44}"))
        elements.append(pen.text(x, y + height + 64, got))
        if place:
            elements.append(pen.arrow(f"{left - 39},{y + height / 2} {left - 2},{y + height / 2}"))
            elements.append(pen.text(left - 20.5, y - 8, "state"))
    return pen.page("A stream: the state goes from call to call", y + height + 76, elements)


def _centred(
    pen: Pen, x: float, middle: float, lines: list[str], *, own: bool = False
) -> list[str]:
    top = middle + 5 - LINE * (len(lines) - 1) / 2
    return [pen.text(x, top + LINE * n, line, bold=own, own=own) for n, line in enumerate(lines)]
