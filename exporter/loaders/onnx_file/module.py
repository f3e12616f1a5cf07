"""An ONNX file as a module: the reference that a conversion of it is compared with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from linexport.errors import UnsupportedModelError
from linexport.graph import external_data
from linexport.loaders.files import first_line
from linexport.loaders.onnx_file.double import widened

_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bool)": np.dtype(np.bool_),
    **{f"tensor({kind})": np.dtype(kind) for kind in ("int8", "int16", "int32", "int64")},
    **{f"tensor({kind})": np.dtype(kind) for kind in ("uint8", "uint16", "uint32", "uint64")},
}


LARGEST_WIDENED = 2**28
"""Bytes of a file, and those beside it, above which it is not run in float64 as well."""

_PLACE = re.compile(r"^.*? failed:\s*|/onnxruntime_src/\S+ .*?\) (?=[A-Z])")


def reason(error: Exception) -> str:
    """Return the message of ONNX Runtime without the place in its sources."""
    return _PLACE.sub("", first_line(error, limit=2000))[:300]


class OnnxModule(torch.nn.Module):
    """Runs the graph of a file in ONNX Runtime on the CPU.

    Called with one tensor per input; returns a tuple of tensors. It computes in the dtypes of the
    file. A copy of it may be converted to float64, in which it is the reference of its own
    rounding; to nothing else.

    Raises:
        UnsupportedModelError: ONNX Runtime does not open it, or an input or output is no tensor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            self._open(str(path))
        except Exception as error:  # ONNX Runtime has no common error
            raise UnsupportedModelError(f"ONNX Runtime cannot open it ({reason(error)})") from error
        for value in [*self.inputs, *self.session.get_outputs()]:
            if value.type not in _DTYPES:
                raise UnsupportedModelError(
                    f"{value.name} is a {value.type}, where tensors of numbers NumPy has are taken"
                )

    def _open(self, model: str | bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = self.session.get_inputs()

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Outputs in the order of the graph's."""
        feeds = {
            given.name: value.numpy().astype(_DTYPES[given.type], copy=False)
            for given, value in zip(self.inputs, args, strict=True)
        }
        return tuple(torch.from_numpy(y) for y in self.session.run(None, feeds))

    def _apply(self, fn: Any, recurse: bool = True) -> OnnxModule:
        """Conversion to another dtype, of a copy.

        Raises:
            UnsupportedModelError: not to float64, or ONNX Runtime lacks kernels for that.
        """
        if fn(torch.empty(0)).dtype != torch.float64:
            raise UnsupportedModelError("an ONNX graph computes in the dtypes that its file fixes.")
        files = [self.path.name, *external_data.files_beside(external_data.read_graph(self.path))]
        if sum((self.path.parent / name).stat().st_size for name in files) > LARGEST_WIDENED:
            raise UnsupportedModelError("the ONNX graph is too large to be run in float64 as well.")
        try:
            self._open(widened(onnx.load(self.path)).SerializeToString())
        except Exception as error:
            raise UnsupportedModelError(
                f"ONNX Runtime does not run the graph in float64 ({reason(error)})"
            ) from error
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        other = OnnxModule.__new__(OnnxModule)
        other.__dict__.update(self.__dict__)
        return other


class Unrunnable(torch.nn.Module):
    """In the place of a graph that is only looked at: gives nothing."""

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """No outputs."""
        return ()
