"""Code that compiles extensions for GPUs while it is imported or run, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from linexport.errors import UnsupportedModelError, UsageError
from linexport.sources.factory import load_factory

pytestmark = pytest.mark.usefixtures("one_thread")

LOAD = (
    'load(name="wkv_of_mine", sources=[os.path.join(HERE, f) for f in ("op.cpp", "kernel.cu")], '
    'extra_cuda_cflags=["-O3"])'
)
INLINE = (
    'load_inline("wkv_of_mine", cpp_sources="", cuda_sources="__global__ void f() {}", '
    'functions=["f"])'
)
CODE = """
import os

import torch
from torch import nn
from torch.utils.cpp_extension import load, load_inline

HERE = os.path.dirname(__file__)
{at_import}


class Net(nn.Module):
    def forward(self, x):
        {at_call}
        return x.relu()


def build():
    return Net(), (torch.randn(2, 6, 8),)
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sources of an extension, without a CUDA compiler."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    for name in ("op.cpp", "kernel.cu"):
        (tmp_path / name).write_text("// nothing\n")
    return tmp_path


def source(folder: Path, at_import: str = "", at_call: str = "pass") -> str:
    file = folder / f"net_{abs(hash((at_import, at_call)))}.py"
    file.write_text(CODE.format(at_import=at_import, at_call=at_call))
    return f"{file}:build"


@pytest.mark.parametrize(
    ("at_import", "at_call", "line"),
    [(LOAD, "pass", 9), (INLINE, "pass", 9), ("", LOAD, 14), ("", INLINE, 14)],
)
def test_an_extension_that_cannot_be_compiled_is_named(
    written: Path, at_import: str, at_call: str, line: int
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load_factory(source(written, at_import, at_call), seed=0)
    message = str(error.value)
    sources = " (op.cpp, kernel.cu)" if LOAD in (at_import, at_call) else ""
    assert f".py:{line} compiles the extension 'wkv_of_mine'{sources}, which fails" in message
    assert "CUDA_HOME environment variable is not set" in message
    assert "where torch.cuda.is_available() is false" in message


def test_sources_that_are_missing_are_an_extension_that_cannot_be_compiled(written: Path) -> None:
    (written / "op.cpp").unlink()
    with pytest.raises(UnsupportedModelError, match=r"'wkv_of_mine' \(op.cpp, kernel.cu\)"):
        load_factory(source(written, LOAD), seed=0)


def test_code_with_another_way_goes_on(written: Path) -> None:
    guarded = f"try:\n    wkv = {LOAD}\nexcept Exception:\n    wkv = None"
    loaded = load_factory(source(written, guarded), seed=0)
    (x,) = loaded.args
    assert torch.equal(loaded.module(x), x.relu())


def test_other_errors_at_import_are_as_before(written: Path) -> None:
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        load_factory(source(written, "1 / 0"), seed=0)
