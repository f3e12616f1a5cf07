"""Binaries of kernels, made ahead of time: no GPU is needed, and no Triton afterwards.

A binary is a cubin with the name of its function and its shared memory, and the PTX it was made
from. They are kept in a cache folder (``LINEXPORT_CACHE``, else ~/.cache/linexport), under the
versions of Triton and of the kernels' sources. Compilation runs in a process of its own: it cannot
take this one down, and Triton's interpreter, where that is switched on here, is not in its way.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

from linexport.errors import BuildError, EnvironmentProblemError
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.launch import Kernel
from linexport.system.child_process import python_module
from linexport.system.install import pip_install_here


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one compute capability.

    Attributes:
        kernel: ``Kernel.name``.
        sm: compute capability times ten.
        entry: name of the function in the cubin.
        shared: bytes of dynamic shared memory to launch it with; above 49,152 the function's limit
            must be raised first (cuFuncSetAttribute).
        warps: 32 threads each, in a block.
        cubin: machine code.
        ptx: what the cubin was assembled from.
        registers: of a thread.
        spilled: bytes stored and loaded because registers ran out.
        serialised: warnings of ptxas that wgmma instructions wait for each other.
    """

    kernel: str
    sm: int
    entry: str
    shared: int
    warps: int
    cubin: bytes
    ptx: str
    registers: int
    spilled: int
    serialised: tuple[str, ...]


def compile_kernels(kernels: Iterable[Kernel], sm: int) -> dict[str, CompiledKernel]:
    """Binaries by ``Kernel.name``; those in the cache are not made again.

    Raises:
        EnvironmentProblemError: Triton is not installed.
        BuildError: a kernel does not compile; holds the compiler's words.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    folder = cache_folder() / f"sm{sm}"
    missing = [k for name, k in by_name.items() if not (folder / f"{name}.json").exists()]
    if missing:
        _compile(missing, sm, folder)
    return {name: _read(folder, name, sm) for name in by_name}


def cache_folder() -> Path:
    """Folder of the binaries of this version of the kernels."""
    base = os.environ.get("LINEXPORT_CACHE")
    root = Path(base) if base else Path.home() / ".cache" / "linexport"
    return root / "kernels" / _version()


@cache
def _version() -> str:
    """A digest of everything binaries depend on but the kernels' own descriptions."""
    if util.find_spec("triton") is None:
        raise EnvironmentProblemError(
            "Kernels are compiled by Triton, which is not installed. "
            f"Install it: {pip_install_here('kernels')}"
        )
    digest = hashlib.sha256(metadata.version("triton").encode())
    folder = Path(__file__).parent
    others = (folder / "expressions.py", folder / "worker.py")
    for path in sorted([*(folder / "sources").glob("*.py"), *others]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(kernels: Sequence[Kernel], sm: int, folder: Path) -> None:
    """Let a worker make the files of each kernel, then move them in: the .json last."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        request = {
            "sm": sm,
            "ptx_version": ARCHITECTURES[sm].ptx,
            "folder": place,
            "kernels": [{"name": kernel.name, **asdict(kernel)} for kernel in kernels],
        }
        done = subprocess.run(
            python_module(f"{__package__}.worker"),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            # Lines would put this machine's paths into binaries, and double their size. The log
            # of the assembler is there of what is compiled, not of what a cache has.
            env={
                **environment,
                "TRITON_CACHE_DIR": str(Path(place) / "triton"),
                "TRITON_DISABLE_LINE_INFO": "1",
                "TRITON_DUMP_PTXAS_LOG": "1",
                "TRITON_ALWAYS_COMPILE": "1",
            },
        )
        if done.returncode:
            raise BuildError(
                f"A kernel does not compile for compute capability {sm / 10:.1f}:\n"
                f"{done.stderr.strip()[-4000:]}"
            )
        for suffix in ("cubin", "ptx", "json"):
            for path in Path(place).glob(f"*.{suffix}"):
                path.replace(folder / path.name)


def _read(folder: Path, name: str, sm: int) -> CompiledKernel:
    about = json.loads((folder / f"{name}.json").read_text())
    return CompiledKernel(
        name,
        sm,
        about["entry"],
        about["shared"],
        about["warps"],
        (folder / f"{name}.cubin").read_bytes(),
        (folder / f"{name}.ptx").read_text(),
        about["registers"],
        about["spilled"],
        tuple(about["serialised"]),
    )
