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


def gpus() -> str:
    """Return the GPUs that kernels are compiled for, and the driver that loads them."""
    from linexport.plugins.kernels.architectures import ARCHITECTURES, toolchain

    rows = []
    for sm, one in ARCHITECTURES.items():
        made = toolchain(sm)
        names = ", ".join(f"`{name.lower()}`" for name in one.gpus)
        ptx = f"{one.ptx // 10}.{one.ptx % 10}"
        rows.append([f"{sm / 10:.1f}", f"`{sm}`", names, made.cuda, f"{made.driver}", ptx])
    titles = ["compute capability", "`--sm`", "or by name", "assembled by CUDA", "driver from"]
    return table([*titles, "PTX with `--quick`"], rows)


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
    "gpus": gpus,
    "exit-codes": exit_codes,
}
