"""Code blocks of a page, and how each is tested.

A comment before a block says what is special about it:

    <!-- test: slow -->                 run with ``-m slow`` only, as are the blocks after it
    <!-- test: fast -->                 ends that: it needs none of the slow blocks before it
    <!-- test: not run, REASON -->      it needs what a test machine lacks
    <!-- test: exit 3 -->               its last command ends with this exit code
    <!-- test: file NAME -->            the content of a file that later blocks use
    <!-- test: given NAME, NAME -->     files that exist before it, see ``tests/docs/conftest.py``

A block ```` ```text ```` right after a tested one is its output: each of its lines must be in the
real output, in order, whatever the numbers are. ``...`` stands for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_BLOCK = re.compile(
    r"(?P<notes>(?:^<!-- test: [^>]*-->\n\n?)*)^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NOTE = re.compile(r"<!-- test: (.*?) -->")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")

TESTED = ("sh", "python")


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes:
        language: ``sh``, ``python``, or that of a file's content.
        text: the content.
        line: line of the page at which it begins.
        slow: run with ``-m slow`` only.
        exit_code: that of its last command.
        file: name of the file it is the content of, or None.
        given: names of files that exist before it.
        output: lines that are in its output, in order.
    """

    language: str
    text: str
    line: int
    slow: bool = False
    exit_code: int = 0
    file: str | None = None
    given: tuple[str, ...] = ()
    output: tuple[str, ...] = field(default=())


def tested_blocks(page: str) -> list[Block]:
    """Return the blocks of a page that are run, in order.

    Raises:
        ValueError: a comment asks for something unknown.
    """
    return list(_tested(page))


def _tested(page: str) -> Iterator[Block]:
    slow, last, end = False, None, 0
    for found in _BLOCK.finditer(page):
        block = Block(found["language"], found["text"], page.count("\n", 0, found.start()) + 1)
        between = page[end : found.start()].strip()
        end = found.end()
        if block.language == "text" and last is not None and not between:
            lines = (line.rstrip() for line in block.text.splitlines())
            last = replace(last, output=tuple(line for line in lines if line))
            continue
        if last is not None:
            yield last
        last = None
        run = block.language in TESTED
        for note in _NOTE.findall(found["notes"]):
            slow = note == "slow" or (slow and note != "fast")
            run = run and not note.startswith("not run, ")
            block = _noted(block, note)
        if run or block.file:
            last = replace(block, slow=slow)
    if last is not None:
        yield last


def _noted(block: Block, note: str) -> Block:
    kind, _, value = note.partition(" ")
    if note in ("slow", "fast") or note.startswith("not run, "):
        return block
    if kind == "exit" and value.isdecimal():
        return replace(block, exit_code=int(value))
    if kind == "file" and value:
        return replace(block, file=value)
    if kind == "given" and value:
        return replace(block, given=tuple(name.strip() for name in value.split(",")))
    raise ValueError(f"line {block.line}: unknown note {note!r}")


def commands(text: str) -> list[str]:
    """Return the commands of a shell block; a line that ends with a backslash goes on."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def missing_line(expected: tuple[str, ...], output: str) -> str | None:
    """Return the first expected line that the output lacks, or None.

    Numbers count as equal, and so does any amount of white space.
    """
    lines = iter([_masked(line) for line in output.splitlines()])
    for line in expected:
        if line != "..." and _masked(line) not in lines:
            return line
    return None


def _masked(line: str) -> str:
    return " ".join(_NUMBER.sub("#", line).split())
