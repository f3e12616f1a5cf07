"""Long exceptions of torch: in one line, or whole, with what to do about them."""

from __future__ import annotations

import re

TERMINAL_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

FOR_DEBUGGING = (
    "Caused by: ",
    "While executing ",
    "Original traceback",
    "from user code",
    "Developer debug context",
    "Hint: Consider using the debug context",
    "Hint: Please open an issue",
    "For more information",
    "For extended logs",
    "For more debugging",
    "For C++",
    "If you suspect",
    "The error above occurred",
    "The following call raised",
    "(Refer to the full stack trace",
    "Set TORCHDYNAMO_VERBOSE",
    "Use tlparse",
)
"""Beginnings of lines about torch's own debugging; nothing about the model comes after them."""

WHILE_FAKED = re.compile(r"got (?P<type>\w+)\((?P<quote>['\"])(?P<text>.*)(?P=quote)\)")
"""An error in what torch says of its own run on tensors without values."""

COMPLEX = (
    "ONNX has no complex numbers: write it with pairs of real ones, (a + bi) (c + di) as ac - bd "
    "and ad + bc, exp(a + bi) as exp(a) cos(b) and exp(a) sin(b)."
)
"""Advice for operators of complex numbers that have no translation."""

ADVICE = (
    (
        r"two branches' output|cond's output stride",
        "The branches of torch.cond must return tensors of one layout: end both with "
        ".contiguous().",
    ),
    (
        r"aten\.\w+_\.\w+' is not functional|mutat",
        "A branch of torch.cond, or a body of while_loop, must not change a tensor in place: write "
        "x = x + 1 for x += 1, and out = out.clone() before out[:, t] = y.",
    ),
    (
        r"[Dd]ata.dependent|torch\.cond",
        "A Python if, a loop or a size that depends on the values of a tensor (.item(), int(x), "
        "bool(x)) cannot be traced: compute both cases and choose with torch.where, and take sizes "
        "from shapes.",
    ),
    (r"complex-valued input", COMPLEX),
    (r"No ONNX function found for", "ONNX has no operator for it: write it with others."),
    (
        r"\.numpy\(\)|[Nn]um[Pp]y",
        "NumPy cannot be traced: use the function of torch of the same name.",
    ),
)
"""Advice, by what a message contains."""


def error_summary(error: BaseException) -> str:
    """Return the type and the first line of an exception."""
    return f"{type(error).__name__}: {_lines(error)[0]}"


def explained(error: BaseException) -> str:
    """Return the type and the message of an exception, without its notes on debugging torch.

    What helps, where that is known, is a line at the end.
    """
    lines = _lines(error)
    last = next((i for i, s in enumerate(lines) if s.strip().startswith(FOR_DEBUGGING)), len(lines))
    text = "\n".join([f"{type(error).__name__}: {lines[0]}", *filter(str.strip, lines[1:last])])
    inner = WHILE_FAKED.search(text)
    text = f"{inner['type']}: {inner['text']}" if inner else text
    advice = next((a for pattern, a in ADVICE if re.search(pattern, text)), None)
    return "\n".join(filter(None, [text, advice]))


def innermost(error: BaseException) -> BaseException:
    """Return the innermost cause: torch wraps it in several layers of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _lines(error: BaseException) -> list[str]:
    text = TERMINAL_COLOUR.sub("", str(error)).strip() or "no message"
    return text.splitlines()
