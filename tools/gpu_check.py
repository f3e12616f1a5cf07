"""A pack that checks and times every GPU kernel on a machine that has a GPU and little else.

    python tools/gpu_check.py --sm 90 FILE        here, where no GPU is needed
    python FILE --json RESULT                     there

The pack is one file that Python runs (a zipapp): the kernels of every case as machine code, their
plans, the launchers of the plugins in Python and in C++, and the float64 oracles. The machine needs
Python 3.11 or newer of the same processor, NumPy, onnx and cuda-bindings; no Triton, no TensorRT,
no compiler. See ``tools/gpu/run.py`` for what it does there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu.case import Case
from gpu.cases import CASES
from gpu.described import described, plan
from gpu.run import KERNELS, LIBRARY, NODES
from gpu.table import COPY, HEADER, line, roofline

from linexport.errors import BuildError, LinexportError, UnsupportedModelError
from linexport.models import feature_maps as feature_maps  # registers their formulas
from linexport.plugins.kernels.contract import architectures
from linexport.plugins.tensorrt import library

TOOLS = Path(__file__).resolve().parent
MAIN = "import sys\nfrom gpu.run import main\nsys.exit(main())\n"

FOUND_MODULES = """
import sys
for name in ("torch", "triton", "tensorrt", "tensorrt_rtx", "onnx_graphsurgeon", "onnxruntime"):
    sys.modules[name] = None
sys.path.insert(0, {tools!r})
import gpu.run
for name, module in sorted(sys.modules.items()):
    if module and name.partition(".")[0] in ("gpu", "linexport") and module.__file__:
        print(name, bool(getattr(module, "__path__", None)), module.__file__)
"""
"""Prints what the checks import; fails where that is a library that the other machine lacks."""


def compile_plugins(output: Path, *headers: Path) -> None:
    """Compile the plugins in C++, and what plays their life, as a library that needs no TensorRT.

    Args:
        output: the library.
        headers: folders of TensorRT's headers and of CUDA's; none: the stand-in for both.

    Raises:
        BuildError: there is no compiler, or it does not compile.
    """
    sources = [*sorted(library.LAUNCHING.glob("*.cpp")), library.SOURCES / "plugin.cpp"]
    command = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra"]
    command += [f"-I{library.LAUNCHING}", "-o", str(output)]
    for folder in headers or [TOOLS / "gpu" / "tensorrt"]:
        command += ["-isystem", str(folder)]
    command += [*map(str, sources), str(TOOLS / "gpu" / "plugin_c.cpp"), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise BuildError("No C++ compiler was found. Install g++ or clang.") from None
    if done.returncode:
        raise BuildError(f"The plugins do not compile:\n{done.stderr[:4000]}")


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the place in the pack, and the file, of every module that the checks import.

    Raises:
        BuildError: they import what the other machine need not have.
    """
    done = subprocess.run(
        [sys.executable, "-c", FOUND_MODULES.format(tools=str(TOOLS))],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BuildError(f"The checks import what they must not:\n{done.stderr[-2000:]}")
    for row in done.stdout.splitlines():
        name, package, file = row.split(" ", 2)
        place = name.replace(".", "/")
        yield f"{place}/__init__.py" if package == "True" else f"{place}.py", Path(file)


@contextmanager
def begun(file: Path) -> Iterator[zipfile.ZipFile]:
    """Yield a pack that has all but its nodes; it takes its file's name once it has those, too.

    Raises:
        BuildError: see ``compile_plugins`` and ``modules``.
    """
    partial = file.with_name(f".{file.name}.partial")
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as pack,
    ):
        compile_plugins(Path(folder) / LIBRARY)
        pack.write(Path(folder) / LIBRARY, LIBRARY)
        pack.writestr("__main__.py", MAIN)
        for place, path in modules():
            pack.write(path, place)
        yield pack
    partial.replace(file)


def write(file: Path, cases: list[Case], sms: list[int]) -> list[str]:
    """Write a pack; return the names of cases that no kernel computes, with the reason.

    Raises:
        BuildError, UsageError: see ``architectures``, ``described`` and ``compile_plugins``.
    """
    left = []
    with begun(file) as pack:
        for case in cases:
            try:
                made = described(case, {sm: plan(case, sm) for sm in architectures(sms)})
            except UnsupportedModelError as error:
                left.append(f"{case.name}: {error}")
                continue
            text = json.dumps(made.attributes())
            place = f"{KERNELS}/{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
            if place not in pack.namelist():
                pack.writestr(place, text)
            pack.writestr(f"{NODES}/{case.name}", place)
            print(f"{case.name}: {sum(map(len, made.binaries.values()))} kernels", flush=True)
    return left


def main() -> int:
    """Write a pack, or print the floors."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("file", type=Path, nargs="?", help="the pack; without it, print floors")
    options.add_argument("--sm", default="90", help="compute capabilities times ten: 80,90")
    options.add_argument("--only", action="append", help="a case's name; all without it")
    given = options.parse_args()
    cases = [case for case in CASES if not given.only or case.name in given.only]
    if given.file is None:
        print(HEADER, *(line(roofline(case, COPY)) for case in cases), sep="\n")
        return 0
    try:
        left = write(given.file, cases, [int(sm) for sm in given.sm.split(",")])
    except LinexportError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(*(f"Left out: {reason}" for reason in left), sep="\n")
    print(f"{given.file}: {given.file.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
