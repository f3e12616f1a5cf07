"""exporter/, models/ and plugins/ become linexport, linexport.models and linexport.plugins.

Kept in code because a declared list of packages silently drops new subpackages. The operators for
ONNX Runtime are compiled where a C++ compiler is found; without one the package installs anyway.

A wheel is for every version of Python: of one platform where it has the compiled libraries, which
do not use Python, and of any where it has none.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
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

    def build_extensions(self) -> None:
        """Files are compiled side by side, which setuptools does one after another."""
        one_after_another = self.compiler.compile

        def side_by_side(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: one_after_another([source], **options), sources)
                return [path for found in made for path in found]

        self.compiler.compile = side_by_side
        super().build_extensions()


class PlatformWheel(bdist_wheel):
    """A wheel whose tag says what was compiled, rather than what was to be."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return py3-none-PLATFORM, or py3-none-any without a library."""
        self.root_is_pure = not any(Path(self.bdist_dir).rglob("*.so"))
        _, _, platform = super().get_tag()
        return "py3", "none", platform


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
            "package/proving/*.mjs",
            "targets/trt/templates/*.txt",
        ],
        "linexport.plugins": [
            *("tensorrt/cpp/*", "kernels/cpp/*", "cpu/cpp/*", "cuda/cpp/*"),
            "cpu/README.md",
        ],
    },
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildLibrary},
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
