"""TensorRT's two Python libraries, ``tensorrt`` and ``tensorrt_rtx``, behind one door.

They have the same classes. What differs between them, and what must be done before either is used
with a plugin, is here and nowhere else.

The SONAME trap: the ONNX parser of TensorRT-RTX looks a plugin up through
``dlopen("libtensorrt_rtx.so")``. The wheel holds ``libtensorrt_rtx.so.1`` only, and the exception
that follows ends the process. ``Flavour.load`` provides the name first, of the library whose
number is that of the Python module's version: ``libnvinfer.so.10`` of TensorRT 10, as on Jetson.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.stub_library import provide
from linexport.system.install import PLACE, pip_install
from linexport.system.versions import numbers


@dataclass(frozen=True)
class Flavour:
    """One of the libraries.

    Attributes:
        name: as the target is called.
        title: as its vendor writes it.
        modules: Python modules it may be installed as, in the order they are tried.
        library: its shared library's name without version, which the parser asks for.
        oldest: the first major version that is used, which is the number of the library's name.
        install: the command that gets it.
        sms: compute capabilities it builds engines for on any machine; none: only for the GPU of
            the machine it runs on.
        on_gpu: builds on the machine of the GPU: it times kernels there, and takes quickly
            deployable plugins (one kernel a node, in the engine itself).
    """

    name: str
    title: str
    modules: tuple[str, ...]
    library: str
    oldest: int
    install: str
    sms: tuple[int, ...] = ()
    on_gpu: bool = False

    def load(self) -> ModuleType:
        """The Python module, safe to parse plugins with.

        Raises:
            EnvironmentProblemError: it is not installed, or does not load.
        """
        return _load(self)

    @property
    def installed(self) -> bool:
        """True if the library can be imported here."""
        try:
            self.load()
        except EnvironmentProblemError:
            return False
        return True

    def version(self) -> str:
        """Version of the installed library; see ``load`` for errors."""
        return str(self.load().__version__)


RTX = Flavour(
    name="tensorrt-rtx",
    title="TensorRT-RTX",
    modules=("tensorrt_rtx", "tensorrt_rtx_bindings"),
    library="libtensorrt_rtx.so",
    oldest=1,
    install=pip_install("tensorrt-rtx"),
    sms=(75, 80, 86, 89, 120, 121),
)

TENSORRT = Flavour(
    name="tensorrt",
    title="TensorRT",
    modules=("tensorrt", "tensorrt_bindings"),
    library="libnvinfer.so",
    oldest=10,
    install=pip_install("tensorrt"),
    on_gpu=True,
)

FLAVOURS = {flavour.name: flavour for flavour in (RTX, TENSORRT)}


@cache
def _load(flavour: Flavour) -> ModuleType:
    problem = None
    for name in flavour.modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name:
                continue
            problem = str(error)
        except (ImportError, OSError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
        else:
            _provide_library(flavour, str(getattr(module, "__version__", "")))
            return module
    if problem is None:
        raise EnvironmentProblemError(
            f"{flavour.title} is not installed. Install it: {flavour.install}{PLACE}"
        )
    raise EnvironmentProblemError(
        f"{flavour.title} is installed and does not load: {problem}. Install it again: "
        f"{flavour.install}{PLACE}"
    )


def _provide_library(flavour: Flavour, version: str) -> None:
    """Make the parser find the library of the Python module that was imported.

    Raises:
        EnvironmentProblemError: the version is too old or no version, or the library is missing.
    """
    major = next(iter(numbers(version)), 0)
    if major < flavour.oldest:
        raise EnvironmentProblemError(
            f"{flavour.title} {version or 'without a version'} is installed; expected "
            f"{flavour.oldest} or newer, which has the interface of linexport's plugins. Update "
            "it, or the JetPack of a Jetson, or convert with --target ort-cuda"
        )
    if not sys.platform.startswith("linux"):
        return  # on Windows libraries are found by another rule
    try:
        provide(flavour.library, f"{flavour.library}.{major}")
    except EnvironmentProblemError as error:
        raise EnvironmentProblemError(
            f"{flavour.title} {version} is installed for Python, without its library. "
            f"{str(error).rstrip('.')}. Install the library of the same version, and name its "
            "folder in LD_LIBRARY_PATH where the loader does not look"
        ) from None


def driver() -> Any:
    """``cuda.bindings.driver``, initialised.

    Raises:
        EnvironmentProblemError: cuda-python, an NVIDIA driver or a GPU is missing.
    """
    try:
        from cuda.bindings import driver as cuda
    except ImportError as error:
        raise EnvironmentProblemError(
            f"The package cuda-bindings is missing ({error}): pip install cuda-bindings"
        ) from None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise EnvironmentProblemError(
            "No NVIDIA driver was found: libcuda.so.1 does not load. Engines need an NVIDIA GPU"
        ) from None
    return cuda
