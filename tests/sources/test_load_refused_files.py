"""Files that are no model linexport reads: recognised, refused with advice, never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.sources import load_model
from tests.support.damage import damaged


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return buffer.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def scripted() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), buffer)
    return buffer.getvalue()


def onnx_model() -> bytes:
    graph = onnx.helper.make_graph([], "g", [], [])
    return bytes(onnx.helper.make_model(graph).SerializeToString())


def arrays() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(2))
    return buffer.getvalue()


LAYER = torch.nn.Linear(2, 2)
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(4)
FACTORY = r"package\.module:callable"
COMMAND = (
    r'\n  linexport\.convert\("FILE\.py:\w+", state_dict="\S+", '
    r'inputs=\["x=float32\[2,16,\d+\]"\]\)\n'
)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (lambda: saved(LAYER), rf"it would import torch\.nn\.modules\.linear\.Linear.*{COMMAND}"),
        (
            lambda: saved(LAYER, _use_new_zipfile_serialization=False),
            rf"would import torch\.nn\.modules\.linear\.Linear.*{FACTORY}",
        ),
        (lambda: saved(LAYER.state_dict()), rf"a state_dict of 2 tensors.*{COMMAND}"),
        (
            lambda: saved(LAYER.state_dict(), _use_new_zipfile_serialization=False),
            r"torch stopped writing with version 1\.6",
        ),
        (lambda: saved({"epoch": 3, "model": LAYER.state_dict()}), "a training checkpoint .*epoch"),
        (lambda: saved({}), "with nothing in it"),
        (lambda: saved(torch.ones(2)), "a single tensor"),
        (lambda: saved([1, 2]), "of a list"),
        (scripted, "a TorchScript archive"),
        (onnx_model, "an ONNX model without a graph"),
        (lambda: SAFETENSORS, rf"weights alone.*{COMMAND}"),
        (lambda: b"\x89HDF\r\n\x1a\n" + bytes(90), "a HDF5 file|an HDF5 file"),
        (lambda: zipped("config.json", "model.weights.h5"), "a Keras archive"),
        (lambda: zipped("word/document.xml"), "a zip archive: no|a zip archive"),
        (lambda: zipped("serialized_exported_program.json"), r"torch 2\.7 or older"),
        (arrays, "a NumPy archive"),
        (lambda: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (lambda: b"", "an empty file"),
        (lambda: b"hello, world", "unknown format"),
        (lambda: random.Random(0).randbytes(4096), "unknown format"),
        (lambda: saved({"a": torch.ones(9)})[:-30], "a damaged zip archive"),
        (lambda: b"PK\x03\x04" + bytes(100), "a damaged zip archive"),
        (lambda: pickle.dumps({"a": 1}), "a pickle"),
    ],
)
def test_other_files_are_refused_with_advice(
    tmp_path: Path, content: Callable[[], bytes], match: str
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content())
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")


def test_refusing_does_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(SAFETENSORS)
    script = (
        "import sys; from linexport.sources import load_model\n"
        "try: load_model(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "m.bin")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown == "UnsupportedModelError False\n"


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_pickles_are_not_run(tmp_path: Path, legacy: bool, wrapped: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "m.pt"
    value = {"format": "linexport", "version": 1, "x": Evil(marker)} if wrapped else Evil(marker)
    path.write_bytes(saved(value, _use_new_zipfile_serialization=not legacy))
    with pytest.raises(UnsupportedModelError, match=r"would import .*can run any code"):
        load_model(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # the control: the pickle works


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("m/data/0", bytes(10**7))
    with pytest.raises(UnsupportedModelError, match="compressed"):
        load_model(path)


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ([], UsageError, "a folder without a model.* or a folder with config.json or adapter_c"),
        (["notes.txt"], UsageError, "a folder without a model"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            UnsupportedModelError,
            "peft_type is 'None', which is not merged here",
        ),
        (["config.json", "model.safetensors"], UnsupportedModelError, "no model_type"),
        (["manifest.json", "model.onnx"], UnsupportedModelError, "linexport validate"),
        (["saved_model.pb"], UnsupportedModelError, "TensorFlow"),
    ],
)
def test_folders(tmp_path: Path, files: list[str], error: type[Exception], match: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(error, match=match):
        load_model(tmp_path)


def test_for_a_python_file_its_command_is_given(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("x = 1")
    with pytest.raises(UnsupportedModelError, match=r"convert.*net\.py:FUNCTION"):
        load_model(tmp_path / "net.py")


@pytest.mark.parametrize("source", ["absent.pt", "a/b/absent", "C:\\models\\m.pt", Path("a:b")])
def test_paths_that_are_not_there(source: str | Path) -> None:
    with pytest.raises(UsageError, match="no file or folder"):
        load_model(source)


def test_paths_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="not a usable path"):
        load_model("x" * 5000)


@pytest.mark.parametrize("folder", [True, False])
def test_unreadable_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool) -> None:
    """Patched, as root may read everything."""
    path = tmp_path / "m.pt"
    path.mkdir() if folder else path.write_bytes(b"x")

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir" if folder else "open", denied)
    with pytest.raises(UsageError, match=r"cannot read .*m\.pt: Permission denied"):
        load_model(path)


def test_pipes_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a regular file nor a folder"):
        load_model(tmp_path / "pipe")


@pytest.mark.parametrize("kind", ["pt", "pt2", "legacy"])
def test_damaged_files_never_escape_as_other_errors(tmp_path: Path, pt2: Path, kind: str) -> None:
    state = {"format": "linexport", "version": 1, "model": "x", "w": torch.ones(3)}
    whole = {
        "pt2": pt2.read_bytes,
        "pt": lambda: saved(state),
        "legacy": lambda: saved(LAYER, _use_new_zipfile_serialization=False),
    }[kind]()
    path = tmp_path / "m.bin"
    for data in damaged(whole, trials=60, seed=7, every=10):
        path.write_bytes(data)
        try:
            load_model(path)
        except LinexportError as error:
            assert "\n" not in str(error)


def test_folders_in_a_folder_that_have_a_model_are_named(tmp_path: Path) -> None:
    for step, name in (("checkpoint-10", "config.json"), ("checkpoint-9", "adapter_config.json")):
        (tmp_path / step).mkdir()
        (tmp_path / step / name).write_text("{}")
    with pytest.raises(UsageError, match=r"have one: checkpoint-10, checkpoint-9\. Give one"):
        load_model(tmp_path)
