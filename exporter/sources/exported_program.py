"""An exported program (``.pt2`` of torch.export.save) becomes a LoadedModel.

The archive is proven harmless by `pt2.check_archive` before torch opens it. torch.export.load
itself is not used: when reading fails it retries with another zip parser and an older format that
unpickles without restriction, which would undo the proof; the reader below it is called instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.errors import UnsupportedModelError
from linexport.sources.archive import TorchArchive
from linexport.sources.files import FACTORY_ADVICE, first_line, refuse, sha256, unreadable
from linexport.sources.linearized import NAME, original_in
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.pt2 import check_archive
from linexport.sources.weights import check_finite

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from linexport.manifest.records import SoftmaxOriginal
    from linexport.sources.half_precision import AsGiven

# Positions of the `train` flag among the arguments of operators that behave differently then.
_TRAIN_FLAG = {"aten.dropout.default": 2, "aten.batch_norm.default": 5}


def load_exported_program(path: Path) -> LoadedModel:
    """Load an exported program.

    Args:
        path: of the ``.pt2`` file.

    Returns:
        The program, its module and its example inputs; `dynamic_shapes` is None since the program
        fixes its own.

    Raises:
        UnsupportedModelError: unsafe, damaged, without example inputs, or of another torch.
        UsageError: the file cannot be read.
    """
    digest = sha256(path)
    try:
        check_archive(TorchArchive(path))
    except UnsupportedModelError as error:
        raise refuse(path, f"an exported program that is not opened: {error}", _ADVICE) from error
    except OSError as error:
        raise unreadable(path, error) from error
    program, module, original = _read(path)
    source = Source("exported_program", str(path), digest, "", linearized=original)
    return of_program(program, module, source)


def of_program(program: ExportedProgram, module: torch.nn.Module, source: Source) -> LoadedModel:
    """Return a program as a model.

    Args:
        program: with example inputs.
        module: that of the program.
        source: where it came from; it is described here.

    Raises:
        UnsupportedModelError: it has no example inputs, or weights that are NaN or infinite.
    """
    if program.example_inputs is None:
        raise UnsupportedModelError(
            f"{source.location} has no example inputs: programs that torch.export.export returns "
            "have them. Set program.example_inputs = (args, kwargs)."
        )
    check_finite(_weights(program), source.location)
    program, module, given, changed = _widened(program, module)
    args, kwargs = program.example_inputs or ((), {})
    count = sum(p.numel() for p in program.parameters())
    loaded = LoadedModel(
        module=module,
        args=tuple(args),
        kwargs=dict(kwargs),
        dynamic_shapes=None,
        source=replace(source, description=f"exported program, {count:,} parameters"),
        program=program,
        warnings=(*_train_mode_warnings(program), *changed),
        given=given,
    )
    from linexport.sources.program_buffers import with_buffers

    return with_buffers(loaded)


def _widened(
    program: ExportedProgram, module: torch.nn.Module
) -> tuple[ExportedProgram, torch.nn.Module, AsGiven | None, tuple[str, ...]]:
    """Return a program that uses bfloat16 in float32, see ``half_precision.widened``."""
    from linexport.sources.half_precision import as_given, said_of
    from linexport.sources.pt2.float32 import in_float32

    args, kwargs = program.example_inputs or ((), {})
    given = as_given(module, tuple(args), dict(kwargs))
    if given is None or given.is_kept:
        return program, module, given, ()
    if not given.on_gpu:
        program = in_float32(program)
        module = program.module()
    return program, module, given, (said_of(given, None),)


_ADVICE = f"if you trust its author, load it in a factory: {FACTORY_ADVICE}"


def _read(path: Path) -> tuple[ExportedProgram, torch.nn.Module, SoftmaxOriginal | None]:
    """Return the program, its module with its guards, and what it is a linear form of."""
    from linexport.models import feature_maps
    from linexport.system.torch_internals.files import ARCHIVE

    feature_maps.kinds()  # defined now: a linear form's program calls them by name
    load_pt2 = ARCHIVE.need()
    try:
        with path.open("rb") as stream, _quiet("torch.export", "torch._export"):
            content = load_pt2(stream)
            program: ExportedProgram = content.exported_programs["model"]
            original = original_in(content.extra_files.get(f"{NAME}.json"))
            return program, program.module(), original
    except Exception as error:  # torch has no common error for programs it cannot rebuild
        raise refuse(
            path,
            f"an exported program that torch could not rebuild ({first_line(error)})",
            f"save it again with the torch installed here, or {FACTORY_ADVICE}",
        ) from error


def _weights(program: ExportedProgram) -> list[tuple[str, torch.Tensor]]:
    """Return weights and constants by name; a number that code names may be NaN."""
    import torch

    tensors = [(n, t) for n, t in program.constants.items() if isinstance(t, torch.Tensor)]
    return [*program.state_dict.items(), *((n, t) for n, t in tensors if t.numel() > 1)]


def _train_mode_warnings(program: ExportedProgram) -> tuple[str, ...]:
    for node in program.graph.nodes:
        position = _TRAIN_FLAG.get(str(node.target))
        if position is not None and len(node.args) > position and node.args[position] is True:
            return (
                f"the program was exported in training mode ({node.target}): its outputs vary from "
                "run to run. Call module.eval() before torch.export.export.",
            )
    return ()


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence torch's loggers: what they say is said in the error."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
