"""Values in a file in the place of memory: nothing of them is lost, and they do leave memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import linexport
from linexport.artifact import write
from linexport.graph import external_data
from linexport.parity.reference.module import Reference
from linexport.sources import load_model
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.memory_map import mapped_parameters, memory_map_weights, unmap_weights
from linexport.system import memory
from linexport.system.progress import Silent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are those of Linux")


def in_files() -> float:
    """Megabytes of this process's memory that files back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("RssFile:")) / 1024


class Tied(torch.nn.Module):
    """Weights of several dtypes and layouts, two of them in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(600, 600)
        self.second = torch.nn.Linear(600, 600)
        self.second.weight = self.first.weight
        self.part = torch.nn.Parameter(self.first.weight.detach()[:300, ::2].t())
        self.short = torch.nn.Parameter(torch.randn(600, 1000).bfloat16())
        self.register_buffer("table", torch.arange(300_000))
        self.register_buffer("small", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 600) -> (B, 1000)."""
        hidden = self.second(self.first(x))
        hidden = hidden + (hidden[:, :300] @ self.part).repeat(1, 2)
        return hidden @ self.short.to(x.dtype) + self.table[:1000] * self.small.sum()


def loaded_model(module: torch.nn.Module) -> LoadedModel:
    return LoadedModel(module, (torch.randn(2, 600),), {}, None, Source("factory", "", None, ""))


def test_memory_mapped_arrays_keep_their_values_and_what_is_written_there() -> None:
    values = [np.random.default_rng(0).random((700, 500)), np.zeros((0, 3)), np.arange(4.0)]
    first, empty, small = memory.memory_mapped(values)
    assert np.array_equal(first, values[0]) and first.dtype == values[0].dtype
    assert empty.shape == (0, 3) and np.array_equal(small, values[2])
    assert memory.is_memory_mapped(first.ctypes.data) and not memory.is_memory_mapped(
        small.ctypes.data
    )
    first[3, 4] = 7.0
    memory.release(first.ctypes.data, first.nbytes)
    assert first[3, 4] == 7.0
    memory.trim_memory()
    values[0][3, 4] = 7.0
    assert np.array_equal(first, values[0])


def test_pages_leave_memory_when_they_are_released() -> None:
    values = np.ones(2**23)
    [kept] = memory.memory_mapped([values])
    before = in_files()
    assert kept.sum() == 2**23
    assert in_files() - before > 60
    memory.release(kept[: 2**22].ctypes.data, kept.nbytes // 2)
    assert 28 < in_files() - before < 36
    memory.trim_memory()
    assert in_files() - before < 4


def test_freed_blocks_are_returned_once_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.trim_memory()
    blocks = [bytearray(2**16) for _ in range(2**11)]
    held = blocks[::64]  # so that no block reaches to the end of what the process has
    grown = memory._resident()
    del blocks
    memory.trim_memory()
    assert grown - memory._resident() > 2**26
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: pytest.fail("blocks were looked for"))
    memory.trim_memory()
    assert len(held) == 32


def test_where_there_is_no_room_for_a_file_values_are_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    [kept] = memory.memory_mapped([np.arange(2.0**18)])
    assert not memory.is_memory_mapped(kept.ctypes.data)
    memory.trim_memory()
    assert np.array_equal(kept, np.arange(2.0**18))


def test_a_model_computes_the_same_with_its_weights_in_a_file() -> None:
    module = Tied().eval()
    loaded = loaded_model(module)
    held = dict(module.named_parameters())
    with torch.no_grad():
        expected = module(*loaded.args)
    for move, mapped in (
        (memory_map_weights, True),
        (memory_map_weights, True),
        (unmap_weights, False),
    ):
        move(loaded)
        assert all(held[name] is p for name, p in module.named_parameters())
        large = (module.first.weight, module.part, module.short, module.table)
        assert [memory.is_memory_mapped(w.data_ptr()) for w in large] == [mapped] * 4
        assert module.part.data_ptr() == module.first.weight.data_ptr()
        assert module.part.stride() == (2, 600) and module.short.dtype == torch.bfloat16
        memory.trim_memory()
        with torch.no_grad():
            assert torch.equal(module(*loaded.args), expected)


def test_an_exported_program_goes_on_with_weights_that_move() -> None:
    module = Tied().eval()
    loaded = loaded_model(module)
    program = torch.export.export(module, loaded.args)
    expected = program.module()(*loaded.args)
    memory_map_weights(LoadedModel(module, loaded.args, {}, None, loaded.source, program=program))
    assert memory.is_memory_mapped(program.state_dict["first.weight"].data_ptr())
    memory.trim_memory()
    assert torch.equal(program.module()(*loaded.args), expected)


def test_the_reference_in_float64_is_the_module_in_float64() -> None:
    module = Tied().eval()
    loaded = loaded_model(module)
    memory_map_weights(loaded)
    reference = Reference(loaded, torch.float64)
    [found] = reference((loaded.args, {}))
    wide = Tied().eval()
    wide.load_state_dict(module.state_dict())
    wide.double()
    with torch.no_grad():
        assert torch.equal(torch.from_numpy(found), wide(loaded.args[0].double()))
    assert module.first.weight.dtype == torch.float32
    before = in_files()
    reference((loaded.args, {}))
    assert in_files() - before < 4  # its weights left memory behind it


def test_the_original_is_asked_before_the_artifact_is_opened(
    factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(owner: Any, name: str, as_: str) -> None:
        call = getattr(owner, name)

        def run(*args: Any, **named: Any) -> Any:
            order.append(as_)
            return call(*args, **named)

        monkeypatch.setattr(owner, name, run)

    from linexport.targets.base import OrtSession

    class Stages(Silent):
        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            order.append(name)
            yield

    noted(Reference, "__call__", "original")
    noted(OrtSession, "__init__", "open")
    settings: dict[str, Any] = {"bench": False, "threads": 1, "progress": Stages()}
    linexport.convert(factories.source("small"), tmp_path / "out", **settings)
    parity = order[order.index("parity") :]
    assert "original" in parity
    assert "original" not in parity[parity.index("open") :]


def test_the_structure_of_a_written_model_is_all_but_its_weights(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    whole = onnx.load_model(str(converted("small") / "model.onnx"))
    large = onnx.numpy_helper.from_array(np.ones(2**19, np.float32), "large")
    whole.graph.initializer.append(large)
    expected = onnx.ModelProto()
    expected.CopyFrom(whole)
    path = write.save_model(whole, tmp_path)
    found = external_data.read_graph(path)
    del expected.graph.initializer[-1]
    assert found == expected
    assert external_data.files_beside(found) == set()


def test_a_model_opened_at_all_gives_back_the_same(factories: SimpleNamespace) -> None:
    loaded = load_model(factories.source("small"))
    before = loaded.module(*loaded.args)
    memory_map_weights(loaded)
    assert torch.equal(loaded.module(*loaded.args), before)


def test_parameters_are_mapped_as_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    large, small = torch.randn(512, 1024), torch.randn(3)

    def registered(size: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        with mapped_parameters(size):
            assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"
            module = torch.nn.Module()
            module.first = torch.nn.Parameter(large.clone())
            module.tied = module.first
            module.other = torch.nn.Parameter(small.clone())
        assert module.tied is module.first and torch.equal(module.other, small)
        assert torch.equal(module.first, large)
        return module.first, module.other

    first, other = registered(large.nbytes)
    assert memory.is_memory_mapped(first.data_ptr())
    assert not memory.is_memory_mapped(other.data_ptr())
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    monkeypatch.setattr("linexport.sources.memory_map.MARGIN", 0)
    first, _ = registered(large.nbytes - 1)
    assert not memory.is_memory_mapped(first.data_ptr())
