"""From the ONNX model to an engine, with what TensorRT says of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from linexport.errors import BuildError
from linexport.plugins.ops.registry import dim_of
from linexport.plugins.tensorrt import quick, quick_plugin
from linexport.plugins.tensorrt.flavour import Flavour
from linexport.plugins.tensorrt.plugin import register
from linexport.targets.trt.log import Log
from linexport.targets.trt.parser_form import by_plugin, namespaces
from linexport.targets.trt.profiles import Profile
from linexport.targets.trt.timing_cache import timing_cache

if TYPE_CHECKING:
    import tensorrt as trt


@dataclass(frozen=True)
class BuiltEngine:
    """A serialised engine, and what the build reported.

    Attributes:
        plan: the file's content.
        plugins: names of the layers that plugins run.
        layers: name and type of every layer, in order of execution.
        scratch: bytes of scratch memory of the layer that needs most.
        layer_scratch: bytes of scratch memory by layer.
        activations: bytes an execution context needs in all.
    """

    plan: bytes
    plugins: tuple[str, ...]
    layers: tuple[dict[str, str], ...]
    scratch: int
    layer_scratch: Mapping[str, int]
    activations: int


def build_engine(
    flavour: Flavour,
    model: onnx.ModelProto,
    place: Path,
    profiles: Sequence[Profile],
    sm: int,
    cache: Path | None = None,
) -> BuiltEngine:
    """Parse and build.

    Args:
        flavour: the library.
        model: as ``graph.parsable`` gives it.
        place: model file, in the folder of its external data.
        profiles: at least one.
        sm: compute capability to build for.
        cache: file of kernels' times; see ``timing_cache`` for its errors.

    Raises:
        EnvironmentProblemError: the library is missing.
        BuildError: it refuses the model; holds its words.
    """
    module = flavour.load()
    expected = sorted(node.name for node in model.graph.node if by_plugin(node))
    creators = register(flavour) if expected else ()
    if quick.NAMESPACE in namespaces(model):
        quick_plugin.register(flavour)
    log = Log()
    sink = log.sink(module)
    try:
        builder = module.Builder(sink)
    except TypeError:  # the constructor gave null
        raise BuildError(_problem(flavour, "cannot build here", log)) from None
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = module.OnnxParser(network, sink)
    if not parser.parse(model.SerializeToString(), str(place)):
        failures = [str(c.failure) for c in creators if c.failure]
        raise BuildError(_problem(flavour, "cannot parse the model", log, failures, parser))
    layers = (network.get_layer(i) for i in range(network.num_layers))
    plugins = tuple(sorted(x.name for x in layers if x.type.name.startswith("PLUGIN")))
    if list(plugins) != expected:
        raise BuildError(
            f"{flavour.title} made plugin layers of {list(plugins)}; expected {expected}."
        )
    config = _config(flavour, builder, sm)
    _add_profiles(builder, config, network, model, profiles)
    with timing_cache(config, cache), _silent():
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildError(_problem(flavour, "cannot build the engine", log))
    return BuiltEngine(
        bytes(plan),
        plugins,
        tuple(log.layers()),
        log.scratch(),
        log.layer_scratch(),
        log.activations(),
    )


@contextmanager
def _silent() -> Iterator[None]:
    """TensorRT's compiler also writes to the process's own streams, past every logger."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number, _ in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def _config(flavour: Flavour, builder: trt.IBuilder, sm: int) -> trt.IBuilderConfig:
    module = flavour.load()
    config = builder.create_builder_config()
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
    if flavour.sms:  # otherwise it builds for the GPU of this machine, and has no such setting
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(module.ComputeCapability, f"SM{sm}"), 0)
    return config


def _add_profiles(
    builder: trt.IBuilder,
    config: trt.IBuilderConfig,
    network: trt.INetworkDefinition,
    model: onnx.ModelProto,
    profiles: Sequence[Profile],
) -> None:
    shapes = {i.name: [dim_of(d) for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    kept = [network.get_input(i).name for i in range(network.num_inputs)]
    for profile in profiles:
        made = builder.create_optimization_profile()
        for name in kept:
            made.set_shape(name, *profile.shapes([_named(name, d, profile) for d in shapes[name]]))
        if config.add_optimization_profile(made) < 0:
            raise BuildError(f"The profile {profile.dims} is not one TensorRT takes.")


def _named(name: str, size: int | str | None, profile: Profile) -> int | str:
    if size is None or (isinstance(size, str) and size not in profile.dims):
        raise BuildError(
            f"The input {name} has the dimension {size or 'without a name'}, of which no range is "
            f"known; there are ranges of {', '.join(profile.dims) or 'none'}."
        )
    return size


def _problem(
    flavour: Flavour,
    what: str,
    log: Log,
    more: Sequence[str] = (),
    parser: trt.OnnxParser | None = None,
) -> str:
    errors = [parser.get_error(i) for i in range(parser.num_errors)] if parser else []
    found = [*more, *(f"{e.desc()} ({e.node_operator()} {e.node_name()})" for e in errors)]
    found = found or log.errors() or ["it gives no reason"]
    return f"{flavour.title} {flavour.version()} {what}: {'; '.join(found[:3])}"
