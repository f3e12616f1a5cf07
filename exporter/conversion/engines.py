"""Engines of a model that was written: built here, or prepared for other machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from linexport import targets
from linexport.artifact.text.language_interface import language_interface, logits_of
from linexport.artifact.text.native_tokenizer import NotNativeError, described
from linexport.conversion.add_records import with_warnings
from linexport.errors import UsageError
from linexport.graph import dims as dimensions
from linexport.manifest import MODEL, ConvertOptions, Manifest
from linexport.manifest.folder import file_record
from linexport.manifest.records import FileRecord

ROUNDED = (
    "ONNX Runtime has no bfloat16 kernels for CPUs: parity and streaming are those of "
    "the model with its rounded weights, computed in float32."
)

FEWER_BITS = "its weights take fewer bits: the ONNX model was compared, and no engine was run"


def options_of(config: ConvertOptions) -> targets.Options:
    """Return the options of a conversion that its target takes."""
    cache = None if config.timing_cache is None else Path(config.timing_cache)
    return targets.Options(
        config.precision,
        config.sms,
        config.plugins,
        config.quick,
        cache,
        config.packed_batches,
    )


def with_built(
    manifest: Manifest, folder: Path, build: targets.Build, converted: targets.Converted
) -> Manifest:
    """Build the engines of the model into its folder."""
    engines = build(converted)
    sizes = {e.file: (folder / e.file).stat().st_size for e in engines}
    files = {e.file: FileRecord(sizes[e.file], e.sha256) for e in engines}
    manifest = replace(manifest, engines=tuple(engines), files={**manifest.files, **files})
    return with_warnings(manifest, [ROUNDED] if manifest.precision == "bf16" else [])


def with_prepared(
    manifest: Manifest, folder: Path, assemble: targets.Assemble, converted: targets.Converted
) -> Manifest:
    """Write the files that build the model's engines on other machines."""
    text, missing = _text_of(manifest, folder)
    prepared = assemble(replace(converted, text=text))
    names = [prepared.plugin_source, prepared.script, prepared.graph, *prepared.loaders]
    files = {name: file_record(folder / name) for name in names if name is not None}
    manifest = replace(manifest, prepared=prepared, files={**manifest.files, **files})
    rounded = [ROUNDED] if manifest.precision == "bf16" else []
    return with_warnings(manifest, [*rounded, *missing])


def _text_of(manifest: Manifest, folder: Path) -> tuple[bytes | None, list[str]]:
    """Return the tokenizer of a language model for programs in C++, or why there is none."""
    try:
        language = language_interface(manifest)
    except UsageError:
        return None, []
    try:
        return described(folder, language.vocabulary), []
    except NotNativeError as reason:
        return None, [f"run.cpp takes no text: {reason}, and it reads byte-level BPE."]


def files_of(manifest: Manifest) -> set[str]:
    """Return the names of engines and of what was written to build them."""
    prepared = manifest.prepared
    others = (prepared.plugin_source, prepared.script, prepared.graph) if prepared else ()
    loaders = () if prepared is None else prepared.loaders
    return {*(e.file for e in manifest.engines), *filter(None, others), *loaders}


def with_engines_of(manifest: Manifest, folder: Path, config: ConvertOptions) -> Manifest:
    """Build, or prepare, the engines of a model whose weights were replaced.

    Args:
        manifest: of a target that builds engines; of no engines yet.
        folder: of the model.
        config: the options that the model was converted by.
    """
    found = targets.find_target(manifest.target)
    target = found.configure(found, options_of(config))
    ranges = {
        name: dimensions.DimRange(d.min, d.opt, d.max, d.batch, d.multiple)
        for name, d in manifest.dims.items()
    }
    past = dimensions.parse(config.dims).get(dimensions.PAST)
    tensors = manifest.inputs, manifest.outputs, manifest.states
    given = targets.Converted(
        folder / MODEL,
        ranges,
        *tensors,
        None if dimensions.PAST in ranges else past,
        logits_of(manifest),
    )
    if target.assemble:
        manifest = with_prepared(manifest, folder, target.assemble, given)
    if target.build:
        manifest = with_built(manifest, folder, target.build, given)
    engines = tuple(replace(e, reason=FEWER_BITS) for e in manifest.engines)
    return replace(manifest, engines=engines)
