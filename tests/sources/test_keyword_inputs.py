"""Inputs that forward takes by name alone, from a factory to run, stream and validate."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.errors import UsageError
from linexport.sources import load_model
from linexport.sources.factory import load_module
from linexport.trace.program import export_program

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCE = textwrap.dedent(
    """
    import torch
    from torch import nn


    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.p = nn.Linear(16, 48)

        def forward(self, q, *, x, bias=None, scale: float = 1.0):
            a, k, v = self.p(x).chunk(3, -1)
            a = nn.functional.elu(a + q) + 1
            y = (a @ (nn.functional.elu(k) + 1).mT).tril() @ v * scale
            return y if bias is None else y + bias


    def three():
        return Named(), (torch.randn(2, 12, 16),), {"x": torch.randn(2, 12, 16), "scale": 0.5}


    def four():
        dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        kwargs = {"bias": torch.randn(2, 12, 16), "x": torch.randn(2, 12, 16)}  # not in order
        return Named(), (torch.randn(2, 12, 16),), kwargs, (dims, dims, dims)
    """
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"named_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(SOURCE)
    return name


@pytest.mark.parametrize("form", ["three", "four"])
def test_keyword_only_inputs_run_stream_and_are_validated(source: str, form: str) -> None:
    manifest = linexport.convert(f"{source}:{form}", "out", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    given = ["q", "x", "bias"] if form == "four" else ["q", "x"]
    states = {s.past for s in manifest.states}
    assert [i.name for i in manifest.inputs if i.name not in states] == given
    module, rng = load_model(f"{source}:{form}").module, np.random.default_rng(1)
    inputs = {n: rng.standard_normal((3, 41, 16)).astype(np.float32) for n in given}
    tensors = {n: torch.from_numpy(x).double() for n, x in inputs.items()}
    with torch.no_grad():
        rest = {} if form == "four" else {"scale": 0.5}
        expected = module.double()(tensors.pop("q"), **tensors, **rest).numpy()
    artifact = linexport.load("out", threads=1)
    [name] = [o for o in artifact.run(**inputs) if o not in {s.present for s in manifest.states}]
    np.testing.assert_allclose(artifact.run(**inputs)[name], expected, atol=1e-4)
    stream = artifact.stream()
    parts = [
        stream.step({n: x[:, a:b] for n, x in inputs.items()})[name]
        for a, b in ((0, 1), (1, 30), (30, 41))
    ]
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, atol=1e-4)
    again = linexport.validate("out", source=f"{source}:{form}", threads=1)
    assert again.status == "ok"


def of(module: nn.Module, *rest: Any) -> Any:
    return load_module((module, *rest), "own:make")


class Masked(nn.Module):
    """Takes arguments by position or name, with defaults in between."""

    def forward(self, x: Tensor, flag: bool = False, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask[..., None]


def test_a_dict_with_a_tensor_is_kwargs_and_any_other_is_dynamic_shapes() -> None:
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5).bool()
    dims = {0: torch.export.Dim.DYNAMIC}
    loaded = of(Masked(), (x,), {"mask": mask})
    assert loaded.kwargs.keys() == {"mask"} and len(loaded.dynamic_shapes) == 2
    loaded = of(Masked(), (x,), {"x": dims})
    assert not loaded.kwargs and loaded.dynamic_shapes == (dims,)
    assert of(Masked(), (x,), None).dynamic_shapes is None


class Shifted(nn.Module):
    """Tokens of an image whose height and width are numbers, as Vision-RWKV takes them."""

    def forward(self, x: Tensor, resolution: tuple[int, int] = (1, 1)) -> Tensor:
        """(B, T, D)."""
        image = x.mT.reshape(x.shape[0], x.shape[2], *resolution)
        return torch.nn.functional.pad(image[..., :-1], (1, 0)).flatten(2).mT + x.mean(1, True)


def test_numbers_that_the_other_arguments_leave_out_are_kwargs() -> None:
    loaded = of(Shifted(), (torch.randn(2, 6, 4),), {"resolution": (2, 3)})
    assert loaded.args[1:] == ((2, 3),) and loaded.dynamic_shapes[1] == (None, None)


@pytest.mark.parametrize("shapes", [{"x": {0: "batch"}}, ({0: "batch"}, None)])
def test_numbers_need_no_dynamic_shapes(shapes: object) -> None:
    x, given = torch.randn(2, 6, 4), {"resolution": (2, 3)}
    loaded = of(Shifted(), (x,), given, shapes)
    program = export_program(loaded).module()
    x = torch.randn(5, 6, 4)
    torch.testing.assert_close(program(x, (2, 3)), Shifted()(x, (2, 3)))


def test_arguments_by_name_that_have_a_place_are_taken_by_it() -> None:
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5).bool()
    loaded = of(Masked(), (), {"mask": mask, "x": x, "flag": True})
    assert loaded.args == (x, True, mask) and not loaded.kwargs


def test_shapes_by_the_names_of_arguments_hold_for_those_by_name_too() -> None:
    dims, x = {0: torch.export.Dim.DYNAMIC}, torch.randn(2, 5, 8)
    mask = torch.ones(2, 5).bool()
    loaded = of(Masked(), (x,), {"mask": mask}, {"mask": None, "x": dims})
    assert loaded.dynamic_shapes == (dims, None)


def test_dims_are_named_as_for_torch_onnx_export() -> None:
    """One name is one size, in whichever input it is."""
    x, mask, names = torch.randn(2, 5, 8), torch.ones(2, 5).bool(), {0: "batch", 1: "time"}
    first, second = of(Masked(), (x,), {"mask": mask}, {"x": names, "mask": names}).dynamic_shapes
    assert [dim.__name__ for dim in first.values()] == ["batch", "time"] and first == second
    of(Masked(), (x,), {"mask": mask}, (names, ["batch", None]))
    with pytest.raises(UsageError, match=r"with the name 'a batch'\. Expected a name of letters"):
        of(Masked(), (x,), {"x": {0: "a batch"}})
    for other in ("batch", {"mode": "fast"}):
        with pytest.raises(UsageError, match="values that say nothing of sizes"):
            of(Masked(), (x,), {"x": other})
