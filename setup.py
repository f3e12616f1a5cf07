"""exporter/, models/ and plugins/ become linexport, linexport.models and linexport.plugins.

Kept in code because a declared list of packages silently drops new subpackages. The CPU plugins are
compiled where a C++ compiler is found; without one the package installs all the same.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

FOLDERS = {
    "linexport": "exporter",
    "linexport.models": "models",
    "linexport.plugins": "plugins",
}
CPU = sorted(Path("plugins/cpu/cpp").iterdir())
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in CPU)).hexdigest()[:16]


class BuildLibrary(build_ext):
    """The extension is a library that ONNX Runtime loads: no module, and no name of one."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


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
        "linexport.plugins": ["tensorrt/cpp/*", "cpu/cpp/*", "cpu/README.md"],
    },
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "linexport.plugins.cpu.liblinexport_cpu",
            sources=[str(path) for path in CPU if path.suffix == ".cc"],
            depends=[str(path) for path in CPU if path.suffix == ".h"],
            define_macros=[("LINEXPORT_SOURCES", f'"{DIGEST}"')],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=fast",  # products and sums as fused multiply-adds
                "-fno-wrapv",  # which Python's own flags ask for: addresses by int64 are slower
                "-fvisibility=hidden",
                "-Wno-psabi",
            ],
            language="c++",
            optional=True,
        )
    ],
)
