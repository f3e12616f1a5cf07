"""Tables of what registries hold: targets, feature maps, ops, passes, exit codes."""

from __future__ import annotations

import inspect

from pages import table


def targets() -> str:
    """Return every target with its line of help."""
    from linexport import targets

    rows = []
    for name, target in targets.listings().items():
        default = " (the default)" if name == targets.DEFAULT else ""
        rows.append([f"`{name}`{default}", target.summary[:1].upper() + target.summary[1:]])
    return table(["`--target`", "the artifact"], rows)


def feature_maps() -> str:
    """Return every feature map: kernel, features, when to use it and how it fails."""
    from linexport.models import feature_maps

    rows = []
    for kind in sorted(feature_maps.kinds()):
        found = feature_maps.find_map(kind)
        rows.append([f"`{kind}`", found.kernel, found.exactness, found.regime, found.failure])
    return table(["map", "kernel it represents", "relation", "use it for", "how it fails"], rows)


def ops() -> str:
    """Return every op of the linexport domain with its inputs and outputs."""
    from linexport.plugins.ops.registry import all_ops

    rows = []
    for name, op in sorted(all_ops().items()):
        schema = op.schema
        inputs = ", ".join(f"`{p.name}`" for p in schema.inputs)
        outputs = ", ".join(f"`{p.name}`" for p in schema.outputs)
        rows.append([f"`{name}`", inputs, outputs])
    return table(["op", "inputs", "outputs"], rows)


def architectures() -> str:
    """Return the compute capabilities that kernels are compiled for, and the driver of each."""
    from linexport.plugins.kernels.architectures import ARCHITECTURES, runs_on, toolchain
    from linexport.system.gpus import GPUS

    known = sorted({gpu.sm for gpu in GPUS} | set(ARCHITECTURES))
    rows = []
    for sm, one in ARCHITECTURES.items():
        made = toolchain(sm)
        ptx = f"{one.ptx // 10}.{one.ptx % 10}"
        others = ", ".join(f"{k / 10:.1f}" for k in known if k != sm and runs_on(sm, k))
        rows.append([f"{sm / 10:.1f}", f"`{sm}`", others, made.cuda, f"{made.driver}", ptx])
    titles = ["compute capability", "`--sm`", "binaries also run on", "assembled by CUDA"]
    return table([*titles, "driver from", "PTX with `--quick`"], rows)


def gpus() -> str:
    """Return every GPU with its names, memory and bandwidth."""
    from linexport.system.gpus import GPUS, SOURCES

    numbers, rows = {source: str(n + 1) for n, source in enumerate(SOURCES)}, []
    for gpu in GPUS:
        names = ", ".join(f"`{name}`" for name in (gpu.name, *gpu.aliases))
        memory, bandwidth = f"{gpu.memory:g}", f"{gpu.bandwidth:,g}"
        row = [gpu.title, names, f"{gpu.sm / 10:.1f}", memory, bandwidth, numbers[gpu.source]]
        rows.append(row)
    titles = ["GPU", "names", "compute capability", "memory, GB", "bandwidth, GB/s", "source"]
    notes = "; ".join(f"({numbers[source]}) {text}" for source, text in SOURCES.items())
    return f"{table(titles, rows)}\n\nSources of bandwidths: {notes}."


def exit_codes() -> str:
    """Return the exit codes of the command line."""
    from linexport import errors

    rows = [["0", "done"]]
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if hasattr(c, "exit_code")]
    for code in sorted({c.exit_code for c in classes}):
        named = sorted(c.__name__ for c in classes if c.exit_code == code)
        rows.append([str(code), ", ".join(f"`{name}`" for name in named)])
    rows.append(["130", "interrupted from the keyboard"])
    return table(["exit code", "Python exception"], rows)


PARTS = {
    "targets": targets,
    "feature-maps": feature_maps,
    "ops": ops,
    "architectures": architectures,
    "gpus": gpus,
    "exit-codes": exit_codes,
}
