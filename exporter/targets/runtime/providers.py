"""ONNX Runtime's execution providers: what each is called, what installs it, how it is started.

    cpu                                  part of every ONNX Runtime
    cuda, tensorrt                       part of the package onnxruntime-gpu
    openvino, webgpu, nv-tensorrt-rtx    libraries of packages besides onnxruntime

ONNX Runtime goes on without a provider that does not start. Here that is an error; what a provider
that did start leaves to the CPU is in ``placement``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.system import environment
from linexport.targets.runtime.options import STRICT_NORMS

if TYPE_CHECKING:
    import onnx
    import onnxruntime

CPU, CUDA = "cpu", "cuda"


def _as_it_is(nodes: Iterable[onnx.NodeProto]) -> None:
    """The default of ``Provider.amend``."""


def _max_for_clip(nodes: Iterable[onnx.NodeProto]) -> None:
    """Clip(x, least) -> Max(x, least): OpenVINO takes the first for 0 where x is int64.

    Positions are counted so, from the padding mask of hybrids: all tokens had position 0.
    """
    for node in nodes:
        given = [name for name in node.input if name]
        both = len(given) == 2 and given == [*node.input[:2]]
        if node.op_type == "Clip" and not node.domain and both:
            node.op_type = "Max"
            del node.input[2:]


def _openvino(threads: int) -> dict[str, str]:
    """Return OpenVINO's settings: by default it rounds to bfloat16 on processors that have that."""
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = str(threads)
    return {"load_config": json.dumps({"CPU": settings})}


@dataclass(frozen=True)
class Provider:
    """An execution provider other than the CPU's.

    Attributes:
        ort_name: ONNX Runtime's name of it.
        package: the distribution that has it.
        purpose: what it is used for.
        module: of a package besides onnxruntime, the module that knows the place of its library.
        device: metadata of the device to take of those that the library offers; the first that fits
            is taken.
        built_in: options that replace ``device`` where ONNX Runtime itself was built with it.
        options: further options for a number of threads, 0 being its own choice.
        settings: of a session.
        advice: what to try where the library offers no device.
        needs: of NVIDIA's that are part of ONNX Runtime, what installs the libraries they load.
        amend: changes nodes, in place, that it computes wrongly to others of the same meaning.
        has_kernels: it has them of the operators of ONNX Runtime's in ``lowering.op_functions``.
        keeps_logits: it runs a language model's head on some tokens alone, see
            ``lowering.kept_logits``.
    """

    ort_name: str
    package: str
    purpose: str = field(default="run artifacts", kw_only=True)
    module: str | None = None
    device: Mapping[str, str] = field(default_factory=dict)
    built_in: Mapping[str, str] = field(default_factory=dict)
    options: Callable[[int], dict[str, str]] = lambda threads: {}
    settings: Mapping[str, str] = field(default_factory=dict)
    advice: str = "Run linexport on a machine that has such a device."
    needs: str = ""
    amend: Callable[[Iterable[onnx.NodeProto]], None] = _as_it_is
    has_kernels: bool = False
    keeps_logits: bool = False


PROVIDERS = {
    # Without the options products are rounded to TF32, and norms of sums are summed in float16.
    CUDA: Provider(
        "CUDAExecutionProvider",
        "onnxruntime-gpu",
        purpose="run artifacts on NVIDIA GPUs, also those of target ort-cuda",
        options=lambda threads: {"use_tf32": "0", STRICT_NORMS: "1"},
        has_kernels=True,
        keeps_logits=True,
        needs="CUDA's libraries and cuDNN are installed by pip install "
        "'onnxruntime-gpu[cuda,cudnn]', and libcuda.so.1 by NVIDIA's driver.",
    ),
    "tensorrt": Provider(
        "TensorrtExecutionProvider",
        "onnxruntime-gpu",
        purpose="run artifacts on NVIDIA GPUs by TensorRT, within ONNX Runtime",
        needs="CUDA's libraries and cuDNN are installed by pip install "
        "'onnxruntime-gpu[cuda,cudnn]'; those of TensorRT, libnvinfer and libnvonnxparser of the "
        "version named, must be on the path of libraries (LD_LIBRARY_PATH).",
    ),
    "nv-tensorrt-rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "onnxruntime-ep-nv-tensorrt-rtx",
        "onnxruntime_ep_nv_tensorrt_rtx",
        purpose="run artifacts on NVIDIA RTX GPUs by TensorRT-RTX, within ONNX Runtime",
    ),
    "openvino": Provider(
        "OpenVINOExecutionProvider",
        "onnxruntime-ep-openvino",
        "onnxruntime_ep_openvino",
        purpose="run artifacts on Intel's processors by OpenVINO",
        device={"ov_device": "CPU"},
        built_in={"device_type": "CPU"},
        options=_openvino,
        advice="It takes Intel's processors alone; the package onnxruntime-openvino, installed in "
        "place of onnxruntime, takes others.",
        amend=_max_for_clip,
    ),
    "webgpu": Provider(
        "WebGpuExecutionProvider",
        "onnxruntime-ep-webgpu",
        "onnxruntime_ep_webgpu",
        purpose="run artifacts on graphics processors of any vendor",
        # In its own layout, NHWC, ONNX Runtime's record has hardly any of the nodes that it runs.
        settings={"ep.webgpuexecutionprovider.preferredLayout": "NCHW"},
        advice="It takes graphics processors alone; the package onnxruntime-webgpu, installed in "
        "place of onnxruntime, also takes Vulkan in software.",
    ),
}
"""By the name users choose."""

NAMES = (CPU, *PROVIDERS)


@dataclass(frozen=True)
class Execution:
    """A choice of execution provider, and whether it must run all ops and states.

    Attributes:
        provider: one of ``NAMES``.
        strict: no part of a linexport op or a state may be left to the CPU.

    Raises:
        UsageError: an unknown provider, or ``strict`` for the CPU.
    """

    provider: str = CPU
    strict: bool = False

    def __post_init__(self) -> None:
        if self.provider not in NAMES:
            raise UsageError(
                f"Unknown execution provider {self.provider!r}; expected one of {', '.join(NAMES)}."
            )
        if self.strict and self.provider == CPU:
            raise UsageError(
                "--strict is of other execution providers than the CPU: give --provider too."
            )

    def check_target(self, name: str, has_engines: bool) -> None:
        """Check that artifacts of a target run in ONNX Runtime.

        Args:
            name: of the target.
            has_engines: whether its artifacts do.

        Raises:
            UsageError: they have, and no execution provider opens engines.
        """
        if self.provider != CPU and has_engines:
            raise UsageError(
                f"--provider {self.provider} is of artifacts that run in ONNX Runtime; this one is "
                f"of target {name}, whose engines run without it. Convert with --target "
                "ort-cuda for CUDA, or with ort or onnx."
            )


CPU_ONLY = Execution()


def install_command(provider: Provider) -> str:
    """Return the command that installs a provider."""
    place = "" if provider.module else "  (in place of onnxruntime)"
    return f"pip install {provider.package}{place}"


def is_beside(provider: Provider) -> bool:
    """Return whether a plugin package with a provider is installed."""
    return provider.module is not None and importlib.util.find_spec(provider.module) is not None


def add_provider(
    options: onnxruntime.SessionOptions,
    name: str,
    threads: int,
    more: Mapping[str, str] | None = None,
) -> str:
    """Make sessions that are opened with these options use a provider.

    Args:
        options: an ``onnxruntime.SessionOptions``.
        name: of ``PROVIDERS``.
        threads: 0 for the provider's own choice.
        more: further options of the provider.

    Returns:
        The distribution that has the provider, with its version.

    Raises:
        EnvironmentProblemError: it is not installed, lacks libraries, or offers no device of this
            machine.
    """
    import onnxruntime
    from onnxruntime.capi import build_and_package_info as build

    provider = PROVIDERS[name]
    settings = {**provider.options(threads), **(more or {})}
    for key, value in provider.settings.items():
        options.add_session_config_entry(key, value)
    available, devices = onnxruntime.get_available_providers(), _devices_beside(provider)
    # ONNX Runtime lists those of libraries that were registered as well.
    if provider.ort_name in available and not devices:
        package = f"{build.package_name} {build.__version__}"
        said = preload() if provider.needs else ""
        try:
            options.add_provider(provider.ort_name, {**provider.built_in, **settings})
        except Exception as error:  # ONNX Runtime has no class for its own
            why = _missing(name, said) or str(error)
            raise EnvironmentProblemError(
                f"The execution provider {name} ({package}) does not start: {why}. {provider.needs}"
            ) from None
        return package
    if not devices and not is_beside(provider):
        raise EnvironmentProblemError(
            f"The execution provider {name} is not installed: found ONNX Runtime "
            f"{onnxruntime.__version__} with {', '.join(available)}. Install {provider.package}"
            f"{'' if provider.module else ', in place of onnxruntime'}."
        )
    if not devices:
        _register(str(provider.module))
        devices = _devices_beside(provider)
    fitting = [d for d in devices if provider.device.items() <= dict(d.ep_metadata).items()]
    package = f"{provider.package} {environment.version(provider.package)}"
    if not fitting:
        raise EnvironmentProblemError(
            f"The execution provider {name} ({package}) finds no device that it runs on in this "
            f"machine ({environment.describe()['cpu']}). {provider.advice}"
        )
    options.add_provider_for_devices(fitting[:1], settings)
    return package


def _devices_beside(provider: Provider) -> list[Any]:
    """Return the devices that a registered library offers, not ONNX Runtime itself."""
    import onnxruntime

    return [
        device
        for device in onnxruntime.get_ep_devices()
        if device.ep_name == provider.ort_name and "library_path" in device.ep_metadata
    ]


@cache
def preload() -> str:
    """Load the libraries of CUDA that pip installed, once in a process; return what failed.

    ONNX Runtime itself looks for them in the system's places alone.
    """
    import onnxruntime

    said = io.StringIO()
    with redirect_stdout(said):
        getattr(onnxruntime, "preload_dlls", lambda: None)()
    return said.getvalue()


def _missing(name: str, said: str) -> str:
    """Return the libraries that a provider of ONNX Runtime itself does not find, in words."""
    from onnxruntime import capi

    try:
        ctypes.CDLL(str(Path(capi.__file__).with_name(f"libonnxruntime_providers_{name}.so")))
    except OSError as error:
        said = f"{said}\n{error}"
    names = re.findall(r"([^\s/]+): cannot open shared object", said)
    return f"{', '.join(dict.fromkeys(names))} not found" if names else ""


@cache
def _register(module: str) -> None:
    """Load the library of a package into ONNX Runtime, once in a process."""
    import onnxruntime

    try:
        path = importlib.import_module(module).get_library_path()
        onnxruntime.register_execution_provider_library(module, path)
    except Exception as error:  # the code of others, and ONNX Runtime has no class for its own
        raise EnvironmentProblemError(
            f"The library of {module} does not load in ONNX Runtime {onnxruntime.__version__}: "
            f"{error}"
        ) from None
