"""Prepared artifact -> the same with an engine, on the machine of the GPU.

files as they were written -> engine -> plugin library -> compared with the original -> manifest
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from linexport import targets
from linexport.artifact.checked import checked_artifact
from linexport.artifact.text.language_interface import logits_of
from linexport.conversion.add_records import with_engines_checked, with_status, with_warnings
from linexport.conversion.publish import write_reports
from linexport.conversion.revalidate import reopen
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import Manifest
from linexport.manifest.engines import EngineRecord
from linexport.manifest.folder import file_record
from linexport.plugins.tensorrt import library
from linexport.system.progress import Progress, Silent, Stopwatch


def build(
    artifact: str | Path,
    *,
    source: str | Path | None = None,
    timing_cache: str | Path | None = None,
    include: str | Path | None = None,
    cuda_include: str | Path | None = None,
    seed: int = 0,
    threads: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Build the engine of a prepared artifact for the GPU of this machine, into its folder.

    Args:
        artifact: the folder that ``convert`` prepared for this GPU and others.
        source: the original, which the engine is compared with; None where it is at the place the
            manifest names, or is not to be had: the engine is then marked as not compared.
        timing_cache: file of kernels' times; None for one in the folder.
        include: folder of TensorRT's headers, for the plugin library that programs in C++ load;
            None for the usual places, and no library where they have none.
        cuda_include: folder of cuda.h, likewise.
        seed: of the random inputs.
        threads: of ONNX Runtime; 0 for its choice.
        trust_remote_code: run Python code that the source brings along.
        progress: shown the stages.

    Returns:
        The updated manifest.

    Raises:
        UsageError: not an artifact, a damaged one, or one that was not prepared.
        EnvironmentProblemError: TensorRT or the GPU is missing, or it is another GPU.
        BuildError: TensorRT refuses the model, or the library does not compile.
    """
    folder, watch = Path(artifact), Stopwatch(progress or Silent())
    with watch.stage("read"):
        manifest = checked_artifact(folder).manifest
    finish = targets.find_target(manifest.target).finish
    if manifest.prepared is None or finish is None:
        raise UsageError(f"{folder} was not prepared for an engine: {_instead(manifest)}")
    with watch.stage("build"):
        cache = None if timing_cache is None else Path(timing_cache)
        engine = finish(targets.Finishing(folder, manifest, cache, logits_of(manifest)))
    manifest = _with_engine(manifest, engine, folder)
    if engine.plugin_library:
        with watch.stage("plugins"):
            manifest = _with_library(manifest, folder, include, cuda_include)
    reason = "the engine is built, and was not compared"
    comparable = source is not None or Path(manifest.source.location).exists()
    if not comparable:
        reason = (
            f"the original, {manifest.source.location}, is not on this machine; linexport validate "
            "FOLDER --source ORIGINAL --record compares it"
        )
    manifest = with_status(_with_engine(manifest, replace(engine, reason=reason), folder))
    write_reports(folder, manifest)  # the engine is there, whatever becomes of the comparison
    if not comparable:
        return manifest
    tested = reopen(checked_artifact(folder), source, threads, trust_remote_code, watch)
    with watch.stage("engines"):
        manifest = with_status(with_engines_checked(manifest, tested, folder, seed))
    write_reports(folder, manifest)
    return manifest


def _instead(manifest: Manifest) -> str:
    if manifest.engines:
        return "it has its engines already."
    return (
        f"it is of target {manifest.target}. Convert the model with --target tensorrt --sm and the "
        "compute capability of the GPU."
    )


def _with_engine(manifest: Manifest, engine: EngineRecord, folder: Path) -> Manifest:
    """The manifest with an engine in the place of one for the same GPU."""
    others = (e for e in manifest.engines if e.sm != engine.sm)
    engines = sorted([*others, engine], key=lambda e: e.sm)
    files = {**manifest.files, engine.file: file_record(folder / engine.file)}
    return replace(manifest, engines=tuple(engines), files=files)


def _with_library(
    manifest: Manifest, folder: Path, include: str | Path | None, cuda_include: str | Path | None
) -> Manifest:
    """The plugin library compiled into the folder, where its headers are or were named."""
    place = folder / library.NAME
    given = [None if path is None else Path(path) for path in (include, cuda_include)]
    try:
        library.build_library(place, *given)
    except EnvironmentProblemError as error:
        if include is not None or cuda_include is not None:
            raise
        said = "The plugin library, which programs in C++ and trtexec load, was not compiled: "
        return with_warnings(manifest, [f"{said}{error}"])
    return replace(manifest, files={**manifest.files, place.name: file_record(place)})
