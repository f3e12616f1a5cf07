"""The process kernels are compiled in: a request in JSON on standard input, files in a folder."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

from linexport.plugins.kernels.architectures import OWN_INSTRUCTIONS
from linexport.plugins.kernels.launch import Kernel
from linexport.plugins.kernels.sources import function, in_tuples, parameters, places
from linexport.system.json_object import JsonObject

ALIGNMENT = [["tt.divisibility", 16]]
"""Alignment of pointers: without this promise no load is wider than one element."""

SERIALISED = ("C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "C7519")
"""Warnings of ptxas that wgmma instructions are serialised; the numbers tell the reason."""


def architecture(sm: int) -> str:
    """Return ptxas's name of a compute capability.

    Triton allows instructions of one architecture for each from 9.0 on. No kernel for 12.0 uses
    one, and its binaries run on 12.1 where they are compiled without.
    """
    return f"sm_{sm}{'a' if sm in OWN_INSTRUCTIONS else ''}"


def compile_one(kernel: Kernel, sm: int, ptx_version: int, folder: Path, name: str) -> None:
    """Write the cubin, the PTX, and what is needed to launch them.

    Raises:
        RuntimeError: it needs scratch memory from its launcher.
    """
    target, passed, constants = function(kernel), parameters(kernel), dict(kernel.constants)
    types = {name: argument.type for name, argument in passed.items()}
    signature = in_tuples(kernel, {**types, **dict.fromkeys(constants, "constexpr")})
    where = places(kernel)
    values = {where[name]: value for name, value in constants.items()}
    aligned = {where[name]: ALIGNMENT for name, argument in passed.items() if argument.is_pointer}
    said = io.StringIO()
    with redirect_stdout(said):
        made = triton.compile(
            ASTSource(target, signature=signature, constexprs=values, attrs=aligned),
            target=GPUTarget("cuda", sm, 32),
            options={
                "num_warps": kernel.warps,
                "num_stages": kernel.stages,
                "ptx_version": ptx_version,
            },
        )
    about = made.metadata
    if about.global_scratch_size or about.profile_scratch_size:
        raise RuntimeError(f"{kernel.function} needs scratch memory, which no launcher gives it")
    (folder / f"{name}.cubin").write_bytes(made.asm["cubin"])
    (folder / f"{name}.ptx").write_text(made.asm["ptx"])
    launch = {"entry": about.name, "shared": about.shared, "warps": about.num_warps}
    (folder / f"{name}.json").write_text(json.dumps(launch | assembled(said.getvalue())))


def assembled(log: str) -> dict[str, object]:
    """Read ptxas's log: registers of a thread, bytes spilled, and warnings of SERIALISED."""
    return {
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "serialised": [code for code in SERIALISED if code in log],
    }


def main(request: JsonObject) -> None:
    """Compile every kernel of a request."""
    compiler.sm_arch_from_capability = architecture
    for described in request["kernels"]:
        kernel = Kernel.from_json(described)
        place = Path(request["folder"])
        compile_one(kernel, request["sm"], request["ptx_version"], place, described["name"])


if __name__ == "__main__":
    main(json.load(sys.stdin))
