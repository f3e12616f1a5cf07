"""An ONNX file as a module: the reference that a conversion of it is compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto

from linexport.errors import UnsupportedModelError
from linexport.graph import external_data
from linexport.graph.retyped import BFLOAT16, DOUBLE, HALF, Kinds, has_bfloat16, retyped
from linexport.sources.files import first_line
from linexport.system.time_limit import opening, watched
from linexport.system.torch_internals.modules import Change, ConvertibleModule

_DTYPES: dict[str, np.dtype[np.generic]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bool)": np.dtype(np.bool_),
    **{f"tensor({kind})": np.dtype(kind) for kind in ("int8", "int16", "int32", "int64")},
    **{f"tensor({kind})": np.dtype(kind) for kind in ("uint8", "uint16", "uint32", "uint64")},
}

AS_SPECIFIED = {"session.disable_quant_qdq": "1"}
"""Settings of ONNX Runtime by which quantised operators are computed as they are specified; integer
kernels may round and saturate otherwise."""

FOLDER = "session.model_external_initializers_file_folder_path"

LARGEST_WIDENED = 2**28
"""Bytes of a file, and those beside it, above which it is not run in float64 as well."""

_PLACE = re.compile(r"^.*? failed:\s*|/onnxruntime_src/\S+ .*?\) (?=[A-Z])")


def reason(error: Exception) -> str:
    """Return the message of ONNX Runtime without the place in its sources."""
    return _PLACE.sub("", first_line(error, limit=2000))[:300]


class OnnxModule(ConvertibleModule):
    """Runs the graph of a file in ONNX Runtime on the CPU, each operator as it is specified.

    Called with one tensor per input; returns a tuple of tensors. It computes in the types of the
    file, but in float32 where the file is in bfloat16 or gives half precision. A copy of it may be
    converted to float64, in which it is the reference of its own rounding, and one of a file that
    gives float16 to float16, as the file is; to nothing else.

    Args:
        path: of the file.
        model: its graph, with or without the weights beside it.

    Raises:
        UnsupportedModelError: ONNX Runtime does not open it, or an input or output is no tensor.
    """

    def __init__(self, path: Path, model: onnx.ModelProto) -> None:
        super().__init__()
        self.path = path
        outputs = {value.type.tensor_type.elem_type for value in model.graph.output}
        self._low: Kinds = BFLOAT16 if has_bfloat16(model) else {}
        self._half: Kinds = HALF if TensorProto.FLOAT16 in outputs else {}
        kinds = {**self._low, **self._half}
        try:
            self._open(retyped(model, kinds).SerializeToString() if kinds else str(path))
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
        for name, value in AS_SPECIFIED.items():
            options.add_session_config_entry(name, value)
        if isinstance(model, bytes):
            options.add_session_config_entry(FOLDER, str(self.path.parent))
        with opening(options):
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
        with watched() as options:
            outputs = self.session.run(None, feeds, options)
        return tuple(torch.from_numpy(y) for y in outputs)

    def converted(self, change: Change, plain: Callable[[], object]) -> None:
        """Convert it to another dtype, of a copy.

        Raises:
            UnsupportedModelError: to one that it is not converted to, or ONNX Runtime lacks kernels
                for that.
        """
        dtype = change(torch.empty(0)).dtype
        if dtype != torch.float64 and not (dtype == torch.float16 and self._half):
            raise UnsupportedModelError("an ONNX graph computes in the dtypes that its file fixes.")
        name = str(dtype).removeprefix("torch.")
        files = [self.path.name, *external_data.files_beside(external_data.read_graph(self.path))]
        too_large = sum((self.path.parent / f).stat().st_size for f in files) > LARGEST_WIDENED
        if too_large and dtype == torch.float64:
            raise UnsupportedModelError("the ONNX graph is too large to be run in float64 as well.")
        try:
            self._open(str(self.path) if dtype == torch.float16 else self._double())
        except Exception as error:
            raise UnsupportedModelError(
                f"ONNX Runtime does not run the graph in {name} ({reason(error)})"
            ) from error

    def _double(self) -> bytes:
        kinds = {**dict.fromkeys((*self._low, *self._half), TensorProto.DOUBLE), **DOUBLE}
        return retyped(onnx.load(self.path), kinds).SerializeToString()

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        other = OnnxModule.__new__(OnnxModule)
        other.__dict__.update(self.__dict__)
        return other


class Unrunnable(torch.nn.Module):
    """In the place of a graph that is only looked at: gives nothing."""

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """No outputs."""
        return ()
