"""A target that builds engines, for one flavour of TensorRT."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from linexport.errors import (
    BuildError,
    EnvironmentProblemError,
    UnsupportedModelError,
    UsageError,
)
from linexport.graph.dims import PAST, DimRange, parse
from linexport.manifest import MODEL
from linexport.manifest.engines import EngineLayerRecord, EngineRecord
from linexport.plugins.kernels import contract
from linexport.plugins.kernels.architectures import ARCHITECTURES, WITHOUT_OWN, runs_on
from linexport.plugins.kernels.description import LAUNCH, Description
from linexport.plugins.ops import linear_attention, mixture_of_experts
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import chunk
from linexport.plugins.ops.op import Node, Op
from linexport.plugins.tensorrt import quick
from linexport.plugins.tensorrt.attributes import AHEAD_OF_TIME
from linexport.plugins.tensorrt.flavour import Flavour
from linexport.targets.base import DTYPES, Converted, Finishing, Options, Target, check_precision
from linexport.targets.lowering.choice import Candidate, Rules, by_rules
from linexport.targets.trt import parser_form, profiles
from linexport.targets.trt.build import BuiltEngine, build_engine
from linexport.targets.trt.convolutions import tokens_first
from linexport.targets.trt.decays import multiply_out
from linexport.targets.trt.device import Device
from linexport.targets.trt.engine_form import engine_form
from linexport.targets.trt.layers import with_layers
from linexport.targets.trt.precision import half, open_here
from linexport.targets.trt.prepared import assemble, cache_name, engine_name
from linexport.targets.trt.session import EngineSession
from linexport.targets.trt.softmax_attention import with_attention

log = logging.getLogger(__name__)

Build = Callable[[Sequence[profiles.Profile]], BuiltEngine]
"""Builds an engine with these profiles."""

GPUS = tuple(sorted({*ARCHITECTURES, *WITHOUT_OWN}))
"""Compute capabilities that an artifact can be prepared for."""


def target(flavour: Flavour, default_sms: tuple[int, ...]) -> Target:
    """The target of a flavour; ``default_sms`` are built for where the user names none."""
    return Target(
        name=flavour.name,
        candidates=partial(candidates, Options()),
        open=open_here,
        configure=partial(configure, flavour, default_sms),
        bound=profiles.bound,
        finish=partial(finish, flavour) if flavour.on_gpu else None,
        deploy=EngineSession,
    )


def configure(
    flavour: Flavour, default_sms: tuple[int, ...], target: Target, options: Options
) -> Target:
    """The target for these options.

    Raises:
        UsageError: a precision or compute capability there is nothing for, or an option the
            library has no use for.
        EnvironmentProblemError: the library is missing, or it builds for the GPU of its machine and
            there is none, and ``options`` name no GPU elsewhere.
    """
    _check(flavour, options)
    if flavour.on_gpu:
        return _configure_elsewhere(flavour, target, options)
    flavour.load()
    chosen = replace(options, sms=tuple(dict.fromkeys(options.sms or default_sms)))
    unknown = [sm for sm in chosen.sms if sm not in flavour.sms]
    if unknown:
        known = ", ".join(map(str, flavour.sms))
        raise UsageError(
            f"--sm names {unknown[0]}; {flavour.title} builds here for {known}. Other GPUs have "
            "engines of --target tensorrt and kernels of --target ort-cuda."
        )
    if chosen.plugins:
        contract.architectures(chosen.sms)
    return _configured(target, chosen, build=partial(build_all, flavour, chosen))


def _configured(target: Target, chosen: Options, **more: Any) -> Target:
    settings = {"written": partial(with_layers, chosen), **more}
    return replace(
        target,
        candidates=partial(candidates, chosen),
        prepare=partial(prepare, chosen),
        options=chosen,
        **settings,
    )


def _configure_elsewhere(flavour: Flavour, target: Target, options: Options) -> Target:
    """The target of a library that builds for the GPU of its machine, or prepares for others.

    An engine for the GPU that is here is built at once; other GPUs that are named are prepared.
    """
    here, problems = look_here(flavour)
    if not options.sms and problems:
        raise EnvironmentProblemError(
            f"{' '.join(problems)}\nTo prepare a folder here that linexport build finishes on the "
            "machine of a GPU, name that GPU: --sm 87, or --sm orin."
        )
    sms = tuple(dict.fromkeys(options.sms)) or (here,)
    chosen = replace(options, sms=tuple(sm for sm in sms if sm is not None))
    unknown = [sm for sm in chosen.sms if sm not in GPUS and sm != here]
    if unknown:
        known = ", ".join(map(str, GPUS))
        raise UsageError(f"--sm names {unknown[0]}; {flavour.title} is prepared for {known}.")
    if chosen.plugins:
        contract.architectures(chosen.sms)
    if chosen.sms == (here,):
        return _configured(target, chosen, build=partial(build_all, flavour, chosen))
    if options.timing_cache and here not in chosen.sms:
        raise UsageError(
            "--timing-cache is of the machine that builds: pass it there, to linexport build."
        )
    now = replace(chosen, sms=tuple(sm for sm in chosen.sms if sm == here))
    return _configured(
        target,
        chosen,
        written=lambda lowered: parser_form.parsable(with_layers(chosen, lowered)),
        build=partial(build_all, flavour, now),
        assemble=partial(assemble, flavour, chosen),
    )


def _check(flavour: Flavour, options: Options) -> None:
    check_precision(options)
    if options.timing_cache and not flavour.on_gpu:
        raise UsageError(
            f"{flavour.title} takes no --timing-cache: it times nothing while it builds, and "
            "compiles for the GPU where the engine is opened."
        )
    if options.packed:
        raise UsageError("--packed-batches are of target ort-cuda: engines take rows.")
    if options.quick and not flavour.on_gpu:
        raise UsageError(f"{flavour.title} takes no quickly deployable plugins: leave out --quick.")
    if options.quick and not options.plugins:
        raise UsageError("--quick and --no-plugins contradict each other.")


def prepare(options: Options, model: onnx.ModelProto) -> onnx.ModelProto:
    """Constants folded, decays multiplied out, precision applied, plugins' nodes marked."""
    if not options.plugins:
        return half(multiply_out(parser_form.fold_constants(model)), options.precision)
    return parser_form.mark_plugins(planned(options, model), partial(_describe, options))


def planned(
    options: Options,
    model: onnx.ModelProto,
    takes: Collection[str] | None = None,
    norms: Collection[str] = (),
    half_caches: bool = False,
) -> onnx.ModelProto:
    """Return the model with its ops as kernels take them, and precision applied; see ``half``."""
    ready = tokens_first(multiply_out(parser_form.fold_constants(model)))
    return half(ready, options.precision, takes, norms, half_caches)


def _describe(options: Options, op: Op, node: Node) -> Description | None:
    dtype = DTYPES[options.precision]
    if contract.unsupported(op, node, dtype, options.sms):
        return None
    if options.quick:
        with suppress(UnsupportedModelError):
            return quick.describe_plugin(op, node, dtype, options.sms)
    return contract.describe_plugin(op, node, dtype, options.sms)


def candidates(options: Options, op: Op, node: Node) -> Sequence[Candidate]:
    """The plugin where the node is marked as its own; the body is for other runtimes."""
    if LAUNCH in node.annotations:
        inside = AHEAD_OF_TIME in node.annotations
        reason = "linexport's kernel, launched by TensorRT" if inside else "linexport's kernels"
        return [Candidate("plugin", reason, op.portable)]
    reason = "standard operators, as --no-plugins asks"
    if options.plugins:
        reason = contract.unsupported(op, node, DTYPES[options.precision], options.sms) or reason
    rules: Rules = {
        linear_attention.OP: partial(_attention, reason),
        mixture_of_experts.OP: _experts,
    }
    return by_rules(rules, reason)(op, node)


def _attention(reason: str, node: Node) -> Sequence[Candidate]:
    causal = linear_attention.view(node)[0].causal
    return [Candidate("fixed_chunks", reason, fixed_chunks)] if causal else []


def _experts(node: Node) -> Sequence[Candidate]:
    reason = "every expert for every token: TensorRT takes no sizes that depend on values"
    return [Candidate("every_expert", reason, mixture_of_experts.every_expert)]


def fixed_chunks(node: Node) -> tuple[Body, list[str]]:
    """Write the chunk form with chunks of one size.

    TensorRT sets memory aside for the largest shapes it can prove: for chunks of any size, scores
    of T x T, 5 GB where this takes 0.1.
    """
    spec, sizes = linear_attention.view(node)
    inputs = node.inputs[: len(linear_attention.INPUTS)]
    phi = linear_attention.absorbed_map(node)
    b = Body()
    return b, chunk.write(b, spec, sizes, inputs, phi, balanced=False)


def build_all(flavour: Flavour, options: Options, converted: Converted) -> list[EngineRecord]:
    """Build an engine for each compute capability; returns their records for the manifest.

    Raises:
        BuildError: see ``build``.
    """
    loaded = parser_form.parsable(onnx.load_model(str(converted.model), load_external_data=False))
    form = engine_form(loaded, converted)
    model, chosen = form.model, form.profiles
    if not flavour.on_gpu and profiles.needs_pairs(model):
        chosen = profiles.with_pairs(chosen)
    fused = None if flavour.on_gpu else with_attention(model)
    records = []
    for sm in options.sms:
        built = partial(_built, flavour, options, converted, sm)
        engine, used, note = _build(built(model), fused and built(fused), chosen)
        file = converted.model.with_name(engine_name(sm))
        partial_file = file.with_name(f".{file.name}.partial")
        partial_file.write_bytes(engine.plan)
        partial_file.replace(file)
        made = record(flavour, options, engine, file, sm, used)
        needs = contract.NAMESPACE in parser_form.namespaces(model)
        in_place = tuple(parser_form.in_place(model))
        made = replace(made, plugin_library=needs, in_place=in_place)
        records.append(replace(made, note=note, logits=form.logits))
    return records


def _built(
    flavour: Flavour, options: Options, converted: Converted, sm: int, model: onnx.ModelProto
) -> Build:
    only = parser_form.only(model, sm)
    place, cache = converted.model, options.timing_cache
    return partial(build_engine, flavour, only, place, sm=sm, cache=cache)


def _build(
    built: Build, fused: Build | None, chosen: Sequence[profiles.Profile]
) -> tuple[BuiltEngine, Sequence[profiles.Profile], str | None]:
    """Build with all profiles, or with the widest where TensorRT refuses several in one engine.

    ``fused`` builds with softmax attention as nodes, which TensorRT may refuse.
    """
    if fused is not None:
        for tried in (chosen, profiles.with_pairs(chosen)):
            try:
                return fused(tried), tried, None
            except BuildError as error:
                log.info("Softmax attention is not one node with profiles %s: %s", tried, error)
    try:
        return built(chosen), chosen, None
    except BuildError as error:
        if len(chosen) == 1:
            raise
        return built(chosen[:1]), chosen[:1], f"one profile, since with {len(chosen)}: {error}"


def look_here(flavour: Flavour) -> tuple[int | None, list[str]]:
    """Return the compute capability of this machine's GPU, or None and what is missing."""
    problems, sm = [], None
    try:
        flavour.load()
    except EnvironmentProblemError as error:
        problems.append(f"{str(error).rstrip('.')}.")
    try:
        device = Device()
        sm = device.sm
        device.close()
    except EnvironmentProblemError as error:
        problems.append(f"{str(error).rstrip('.')}.")
    return None if problems else sm, problems


def finish(flavour: Flavour, job: Finishing) -> EngineRecord:
    """Build the engine of a prepared artifact for the GPU of this machine.

    Raises:
        EnvironmentProblemError: the library or a GPU is missing, or the artifact was not prepared
            for this one; says all that is missing.
        UsageError: the artifact was prepared by options that cannot be read again.
        BuildError: see ``build_engine``.
    """
    manifest, prepared, given = job.manifest, job.manifest.prepared, job.manifest.options
    if prepared is None or given is None:
        raise UsageError(f"{job.folder} was not prepared for engines. Convert the model again.")
    gpus = ", ".join(f"{gpu.sm / 10:.1f}" for gpu in prepared.gpus)
    here, problems = look_here(flavour)
    if here is None:
        raise EnvironmentProblemError(
            f"{job.folder} is prepared for {flavour.title} on GPUs of compute capability {gpus}, "
            f"and its engine cannot be built on this machine. {' '.join(problems)}\nCopy the "
            f"folder to the machine of such a GPU and run there: linexport build {job.folder.name}"
        )
    if not any(runs_on(gpu.sm, here) for gpu in prepared.gpus):
        raise EnvironmentProblemError(
            f"{job.folder} is prepared for GPUs of compute capability {gpus}; this machine's has "
            f"{here / 10:.1f}. Convert the model with --sm {here}."
        )
    cache = job.timing_cache or job.folder / cache_name(here)
    options = Options(manifest.precision, (here,), given.plugins, given.quick, cache)
    ranges = {
        name: DimRange(d.min, d.opt, d.max, d.batch, d.multiple)
        for name, d in manifest.dims.items()
    }
    model = job.folder / MODEL
    tensors = manifest.inputs, manifest.outputs, manifest.states
    past = parse(given.dims).get(PAST)
    (built,) = build_all(flavour, options, Converted(model, ranges, *tensors, past, job.logits))
    return built


def record(
    flavour: Flavour,
    options: Options,
    engine: BuiltEngine,
    file: Path,
    sm: int,
    chosen: Sequence[profiles.Profile],
) -> EngineRecord:
    """Describe an engine that has just been built and was not run yet."""
    return EngineRecord(
        file=file.name,
        sha256=hashlib.sha256(engine.plan).hexdigest(),
        runtime=flavour.name,
        version=flavour.version(),
        sm=sm,
        precision=options.precision,
        plugins=tuple(engine.plugins),
        layers=tuple(EngineLayerRecord(**layer) for layer in engine.layers),
        scratch_bytes=engine.scratch,
        layer_scratch_bytes=dict(engine.layer_scratch),
        activation_bytes=engine.activations,
        profiles=tuple(profile.record() for profile in chosen),
        plugin_library=False,
        in_place=(),
    )
