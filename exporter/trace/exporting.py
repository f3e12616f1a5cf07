"""The state torch's exporters run in: silent, and without a cache that costs more than it saves.

A fake tensor stands for one of unknown size. torch keeps the results of operators on fake tensors
and looks them up by their inputs. Where sizes are symbols a look-up costs more than the operator:
without the cache, eight small attention modules are traced in 17.9 s of CPU instead of 24.3, and
a Qwen3.5 of four layers in 23.2 instead of 25.1.

What ``torch.compile`` has of ``torch.cond`` after an export is that of the export: a module with
branches could neither be run nor exported again in torch 2.13.0. So it forgets what it has.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from linexport.trace import user_frames


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Silence the exporters' progress and deprecation chatter; errors still raise."""
    from torch._dynamo import config, reset  # slow to import, and imported by every export

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    for name, kept in FILTERS.items():
        logging.getLogger(name).addFilter(kept)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            config.patch(fake_tensor_cache_enabled=False),
            user_frames.kept(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        reset()
        log.setLevel(level)
        for name, kept in FILTERS.items():
            logging.getLogger(name).removeFilter(kept)


def _is_no_warning(record: logging.LogRecord) -> bool:
    """Leave out warnings: torch gives one beside an error that it raises, or cannot word a hint."""
    return record.levelno < logging.WARNING


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Leave out tracebacks of operators that fail: torch raises the error as well."""
    return not record.exc_info


FILTERS = {
    "torch.fx.experimental.symbolic_shapes": _is_no_warning,
    "torch.export._trace": _is_no_warning,
    "torch._subclasses.fake_tensor": _is_no_failure,
}
"""Filters of torch's own logs, by their names."""
