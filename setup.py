"""exporter/, models/ and plugins/ become linexport, linexport.models and linexport.plugins.

Kept in code because a declared list of packages silently drops new subpackages. The operators for
ONNX Runtime are compiled where a C++ compiler is found; without one the package installs anyway.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "linexport": "exporter",
    "linexport.models": "models",
    "linexport.plugins": "plugins",
}
FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden"]


def library(
    name: str,
    folders: list[str],
    flags: list[str],
    defined: list[tuple[str, str]],
    linked: list[str],
) -> Extension:
    """Return a library of operators; its sources, and their digest, are those of the folders."""
    files = [path for folder in folders for path in sorted(Path(folder).iterdir())]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return Extension(
        f"linexport.plugins.{name}.liblinexport_{name}",
        sources=[str(path) for path in files if path.suffix in (".cc", ".cpp")],
        depends=[str(path) for path in files if path.suffix == ".h"],
        include_dirs=[*folders, "plugins/cpu/cpp"],
        define_macros=[("LINEXPORT_SOURCES", f'"{digest}"'), *defined],
        extra_compile_args=[*FLAGS, *flags],
        libraries=linked,
        language="c++",
        optional=True,
    )


class BuildLibrary(build_ext):
    """The extension is a library that ONNX Runtime loads: no module, and no name of one."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Files are compiled side by side, which setuptools does one after another."""

        def compiled(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=ext.extra_compile_args,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [path for found in pool.map(compiled, ext.sources) for path in found]
        ext.extra_objects, ext.sources = objects, []
        super().build_extension(ext)


setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    ],
    package_data={
        "linexport": [
            "py.typed",
            "serving/http/*.html",
            "report/*.html",
            "report/*.css",
            "manifest/schema.json",
            "package/*.txt",
            "targets/trt/templates/*.txt",
        ],
        "linexport.plugins": [
            *("tensorrt/cpp/*", "kernels/cpp/*", "cpu/cpp/*", "cuda/cpp/*"),
            "cpu/README.md",
        ],
    },
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        library(
            "cpu",
            ["plugins/cpu/cpp"],
            [
                "-ffp-contract=fast",  # products and sums as fused multiply-adds
                "-fno-wrapv",  # which Python's own flags ask for: addresses by int64 are slower
                "-Wno-psabi",
            ],
            [],
            [],
        ),
        library(
            "cuda",
            ["plugins/cuda/cpp", "plugins/kernels/cpp"],
            [],
            [("LINEXPORT_EXECUTION_PROVIDER", '"CUDAExecutionProvider"')],
            ["dl"],
        ),
    ],
)
