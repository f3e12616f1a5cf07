"""Tell what a path is from its content: magic bytes, zip members, files of a folder.

Nothing is unpickled or parsed beyond headers here.
"""

from __future__ import annotations

import enum
import stat
import zipfile
from pathlib import Path

from linexport.errors import UsageError
from linexport.sources.files import unreadable

_HEAD_BYTES = 64


class Kind(enum.Enum):
    """Every kind of path that is detected; three are loaded, the others refused with advice."""

    EXPORTED_PROGRAM = "exported program"
    TORCH_ZIP = "torch.save file"
    OLD_EXPORTED_PROGRAM = "exported program of torch 2.7 or older"
    TORCHSCRIPT = "TorchScript archive"
    KERAS = "Keras archive"
    NUMPY = "NumPy archive"
    OTHER_ZIP = "zip archive"
    DAMAGED_ZIP = "damaged zip archive"
    PICKLE = "pickle"
    HDF5 = "HDF5 file"
    SAFETENSORS = "safetensors file"
    ONNX = "ONNX model"
    GGUF = "GGUF file"
    LFS_POINTER = "Git LFS pointer"
    PYTHON = "Python source"
    EMPTY = "empty file"
    UNKNOWN = "file of unknown format"
    ARTIFACT_FOLDER = "linexport artifact"
    HUGGING_FACE_FOLDER = "Hugging Face model folder"
    DIFFUSERS_FOLDER = "folder of a model of diffusers"
    ADAPTER_FOLDER = "adapter, of LoRA say, without the model it changes"
    GGUF_FOLDER = "folder of GGUF files"
    SAVED_MODEL_FOLDER = "TensorFlow SavedModel folder"
    OTHER_FOLDER = "folder"


def recognise(path: Path) -> Kind:
    """Kind of an existing path.

    Raises:
        UsageError: it cannot be read, or is neither a regular file nor a folder.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _folder({entry.name for entry in path.iterdir()})
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path} is neither a regular file nor a folder. Give a model file.")
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    return _file(path, head, size)


def _folder(names: set[str]) -> Kind:
    if "manifest.json" in names:
        return Kind.ARTIFACT_FOLDER
    if "saved_model.pb" in names:
        return Kind.SAVED_MODEL_FOLDER
    if "config.json" in names:
        weights = any(name.startswith("diffusion_pytorch_model") for name in names)
        return Kind.DIFFUSERS_FOLDER if weights else Kind.HUGGING_FACE_FOLDER
    if "modules.json" in names:  # of sentence-transformers, with the model in a folder of its own
        return Kind.HUGGING_FACE_FOLDER
    if "adapter_config.json" in names:
        return Kind.ADAPTER_FOLDER
    if any(name.endswith(".gguf") for name in names):
        return Kind.GGUF_FOLDER
    return Kind.OTHER_FOLDER


def _file(path: Path, head: bytes, size: int) -> Kind:
    if not head:
        return Kind.EMPTY
    if head.startswith(b"PK"):
        return _zip(path)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return Kind.HDF5
    if head.startswith(b"GGUF"):
        return Kind.GGUF
    if head.startswith(b"version https://git-lfs"):
        return Kind.LFS_POINTER
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return Kind.SAFETENSORS
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return Kind.PICKLE
    if _looks_like_onnx(head) or path.suffix == ".onnx":
        return Kind.ONNX
    return Kind.PYTHON if path.suffix == ".py" else Kind.UNKNOWN


def _looks_like_onnx(head: bytes) -> bool:
    """A ModelProto starts with field 1 (ir_version, a small varint); other fields may follow."""
    following = {field << 3 | 2 for field in (2, 3, 4, 6, 7, 8)} | {5 << 3}
    return len(head) > 2 and head[0] == 0x08 and 0 < head[1] < 0x20 and head[2] in following


def _zip(path: Path) -> Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, NotImplementedError, OSError):
        return Kind.DAMAGED_ZIP
    if "serialized_exported_program.json" in names:
        return Kind.OLD_EXPORTED_PROGRAM
    if {"config.json", "model.weights.h5"} <= names:
        return Kind.KERAS
    # torch puts every member under one folder named after the file.
    inner = {name.partition("/")[2] for name in names}
    if "archive_format" in inner or "models/model.json" in inner:
        return Kind.EXPORTED_PROGRAM
    if "data.pkl" in inner:
        return Kind.TORCHSCRIPT if "constants.pkl" in inner else Kind.TORCH_ZIP
    if names and all(name.endswith(".npy") for name in names):
        return Kind.NUMPY
    return Kind.OTHER_ZIP
