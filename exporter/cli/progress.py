"""Stages on standard error: a spinner with elapsed time, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from linexport.system.progress import Advance

NAMES = {
    "load": "Loading the model",
    "trace": "Tracing it to ONNX",
    "rewrite": "Rewriting the graph",
    "lower": "Choosing lowerings",
    "write": "Writing the model",
    "parity": "Comparing it with the original",
    "vision": "Writing the vision tower",
    "mtp": "Writing and comparing the head for multi-token prediction",
    "streaming": "Checking that it streams",
    "layers": "Comparing its layers with those of the original",
    "library": "Comparing the CPU library with its functions",
    "work": "Counting its work",
    "prepare": "Writing what builds engines elsewhere",
    "build": "Building engines",
    "plugins": "Compiling the plugin library",
    "engines": "Running its engines",
    "measure": "Measuring it against plain export and PyTorch",
    "sample": "Taking queries, keys and values",
    "judge": "Comparing maps with softmax and with their theory",
    "plan": "Counting the features that the promise takes",
    "export": "Exporting a layer with each",
    "memory": "Measuring their memory",
    "time": "Timing them in turns",
    "find": "Finding softmax attention",
    "fit": "Fitting linear forms",
    "feed-forward": "Linearising feed-forward layers",
    "distil": "Learning the original's layer outputs",
    "compare": "Comparing both models",
    "read": "Reading the artifact",
    "calibrate": "Measuring the inputs of its products",
    "quantise": "Quantising weights",
    "sensitivity": "Trying each weight alone",
    "choose": "Choosing bits",
    "search": "Searching the first value that differs",
    "search-forms": "Searching the form of each layer",
    "overlay": "Measuring every node",
    "save": "Writing the linear form",
}

QUIET = 5
"""Seconds after which what is left is worth a line's end."""


class Spinner:
    """Shows stages with rich; see ``linexport.system.progress.Progress``."""

    def __init__(self, quiet: bool = False) -> None:
        from linexport.system.terminal import plain_console

        self._console = plain_console(stderr=True, quiet=quiet, highlight=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A line for one stage."""
        text = NAMES.get(name, name)
        start = time.perf_counter()
        if not self._console.is_terminal:
            self._console.print(f"  {text} ...")
        with self._timed_status(text):
            yield
        took = f"{time.perf_counter() - start:.1f} s"
        self._console.print(f"[green]✓[/green] {text} [dim]{took}[/dim]")

    @contextmanager
    def steps(self, name: str, total: int) -> Iterator[Advance]:
        """A bar within a stage and the time left; without a terminal, a line now and then."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        if not self._console.is_terminal:
            yield self._lines(total)
            return
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("", total=total)
            yield lambda done, note: progress.update(bar, completed=done, description=note)

    def _lines(self, total: int) -> Advance:
        """Return a function that prints the steps done, and after a while the time left."""
        start = time.perf_counter()

        def advance(done: int, note: str) -> None:
            passed = time.perf_counter() - start
            left = passed / max(done, 1) * (total - done)
            more = f", about {left:.0f} s left" if passed > QUIET and done < total else ""
            self._console.print(f"    {done}/{total}  {note}{more}", markup=False)

        return advance

    def note(self, text: str) -> None:
        """The text as it is."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def _timed_status(self, text: str) -> Iterator[None]:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as progress:
            progress.add_task(text, total=None)
            yield
