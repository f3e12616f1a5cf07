"""The engine of an artifact for Triton's backend ``tensorrt``: which one, and what it needs.

    REPOSITORY/NAME/1/model.plan                  the engine
    REPOSITORY/NAME/liblinexport_tensorrt.so      its plugins, where they are given

The server takes the engines of one version of TensorRT only, its own, and none of TensorRT-RTX.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest.engines import EngineRecord
from linexport.package.destination import Packaging
from linexport.plugins.tensorrt.library import NAME as LIBRARY
from linexport.targets.runtime.options import LOGITS_AT, LOGITS_TO_KEEP

RUNTIME = "tensorrt"


def has_engine(job: Packaging) -> bool:
    """Return whether an artifact has an engine that the server could open."""
    return any(engine.runtime == RUNTIME for engine in job.manifest.engines or ())


def chosen(job: Packaging) -> EngineRecord:
    """Return the engine that ``sm`` names, or the only one.

    Raises:
        UsageError: the artifact has none, or several.
    """
    engines = [e for e in job.manifest.engines or () if e.runtime == RUNTIME]
    if not engines:
        other = sorted({e.runtime for e in job.manifest.engines or ()})
        there = f"engines of {', '.join(other)} only" if other else "no engine"
        more = "Convert with --target tensorrt on a machine with the GPU"
        if job.manifest.not_built:
            more = f"Run linexport build {job.source} on the machine of the GPU"
        raise UsageError(
            f"{job.source} has {there}; the tensorrt backend opens engines of TensorRT. {more}, "
            "or pass --option backend=python."
        )
    requested = job.options.get("sm")
    fitting = [e for e in engines if requested in (None, str(e.sm))]
    if len(fitting) != 1:
        there = ", ".join(str(e.sm) for e in engines)
        raise UsageError(f"{job.source} has engines for {there}: choose one by --option sm=.")
    names = [t.name for t in (*job.manifest.inputs, *job.manifest.outputs)]
    odd = [name for name in names if not re.fullmatch(r"\w+", name, flags=re.ASCII)]
    if odd:
        raise UsageError(
            f"The engine has the input or output {odd[0]!r}, and names in an engine cannot be "
            "changed. Pass --option backend=python."
        )
    return fitting[0]


def write_engine(job: Packaging, engine: EngineRecord, version: Path) -> tuple[str, ...]:
    """Write the engine, and its plugins where they are given; return what users should know.

    Raises:
        UsageError: the library of plugins cannot be read.
    """
    shutil.copyfile(job.source / engine.file, version / "model.plan")
    notes = [
        f"The server must be one with TensorRT {engine.version} and a GPU of {engine.sm / 10}."
    ]
    if not engine.checked:
        notes.append(f"The engine was not checked: {engine.reason or 'it was not run'}.")
    given = job.options.get("plugins")
    if given is not None:
        try:
            shutil.copyfile(given, version.parent / LIBRARY)
        except OSError as error:
            raise UsageError(f"plugins={given}: {error.strerror}.") from error
    if engine.plugin_library:
        there = f"REPOSITORY/{job.name}/{LIBRARY}" if given else "FILE"
        made = "" if given else "Make it by linexport plugins build. "
        notes.append(
            f"The engine needs linexport's plugins. {made}Start the server with "
            f"--backend-config=tensorrt,plugins={there}."
        )
    if engine.logits is not None:
        most = engine.profiles[0].dims[LOGITS_TO_KEEP][2]
        notes.append(
            f"A request gives {LOGITS_AT}, the places of the tokens whose logits it reads: of T "
            f"tokens, the last is at T - 1. They are {most} at most."
        )
    return tuple(notes)


def largest_batch(job: Packaging, engine: EngineRecord, usual: int) -> int:
    """Return the most sequences of one call: as many as every profile of the engine takes."""
    batch = job.manifest.inputs[0].shape[0]
    sizes = [
        p.dims[batch][2] for p in engine.profiles if isinstance(batch, str) and batch in p.dims
    ]
    return min([usual, *sizes])


def instances(engine: EngineRecord) -> list[str]:
    """Return the lines of config.pbtxt that say where the engine runs, with all its profiles."""
    profiles = ", ".join(f'"{place}"' for place in range(len(engine.profiles)))
    which = f" profile: [ {profiles} ]" if profiles else ""
    return [f"instance_group [ {{ kind: KIND_GPU count: 1{which} }} ]"]


def kept_logits(engine: EngineRecord) -> list[str]:
    """Return the line of config.pbtxt for the input that says which logits are computed."""
    if engine.logits is None:
        return []
    return [f'input [ {{ name: "{LOGITS_AT}" data_type: TYPE_INT64 dims: [ -1 ] }} ]']
