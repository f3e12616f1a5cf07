"""The state torch's exporters run in: silent, and without a cache that costs more than it saves.

What ``torch.compile`` has of ``torch.cond`` after an export is that of the export: a module with
branches could neither be run nor exported again in torch 2.13.0. So it forgets what it has.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import torch

from linexport.system.torch_internals.exports import LOGS, unsolved_left_open, without_fake_cache
from linexport.trace import user_frames


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Silence the exporters' progress and deprecation chatter; errors still raise."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    for name, kept in FILTERS.items():
        logging.getLogger(name).addFilter(kept)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            without_fake_cache(),
            unsolved_left_open(),
            user_frames.kept(),
            _own_events(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.reset()
        log.setLevel(level)
        for name, kept in FILTERS.items():
            logging.getLogger(name).removeFilter(kept)


@contextlib.contextmanager
def _own_events() -> Iterator[None]:
    """Let only torch's own handler have the log of events, which has one for TORCH_TRACE.

    It has each size that is computed, with the stack, once it has a handler, and pytest gives
    its own to all loggers that do not propagate: a fifth of the time of a trace in a test.
    """
    log = logging.getLogger(LOGS["events"])
    saved = log.handlers
    log.handlers = [h for h in saved if type(h).__module__.partition(".")[0] == "torch"]
    try:
        yield
    finally:
        log.handlers = saved


def _is_no_warning(record: logging.LogRecord) -> bool:
    """Leave out warnings: torch gives them with errors it raises, or where it has no hint."""
    return record.levelno < logging.WARNING


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Leave out tracebacks of operators that fail: torch raises the error as well."""
    return not record.exc_info


FILTERS = {
    LOGS["sizes"]: _is_no_warning,
    LOGS["trace"]: _is_no_warning,
    LOGS["values"]: _is_no_failure,
}
"""Filters of torch's own logs, by their names."""
