"""Objects of a notebook: what is taken, what is refused, and that nothing of it is changed."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import linexport
from linexport.errors import UsageError
from linexport.sources import load_model
from linexport.sources.objects import with_examples
from linexport.system.copies import copied
from tests.support.families import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Attention(nn.Module):
    """Causal linear attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        y = (q.sigmoid() @ k.sigmoid().mT).tril() @ v
        return y if scale is None else y * scale


def example() -> Tensor:
    return torch.randn(2, 12, WIDTH)


def exported(module: nn.Module) -> Any:
    return export(module, (example(),), dynamic_shapes={"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}})


def test_a_module_converts_and_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, x = Attention().train(), example()
    weights = {name: (w, w.clone()) for name, w in module.state_dict(keep_vars=True).items()}
    manifest = linexport.convert(module, args=(x,), bench=False, threads=1)
    assert (manifest.status, manifest.artifact) == ("ok", "Attention.artifact")
    assert manifest.source.kind == "object" and manifest.source.location.endswith(".Attention")
    assert "ok" in repr(manifest) and "streams" in repr(manifest) and len(repr(manifest)) < 200
    kept = module.state_dict(keep_vars=True)
    assert module.training and all(kept[n] is w for n, (w, _) in weights.items())
    assert all(torch.equal(w, before) for w, before in weights.values())

    artifact = manifest.load()
    assert "Attention.artifact" in repr(artifact) and "streams" in repr(artifact)
    with torch.no_grad():
        expected = module.eval()(x).numpy()
    np.testing.assert_allclose(artifact.run(x.numpy())["output"], expected, atol=1e-5)
    with artifact.stream() as stream:
        first = stream.step(x[:, :1].numpy())["output"]
    assert "not begun" in repr(stream)
    np.testing.assert_allclose(first, expected[:, :1], atol=1e-5)

    found = linexport.validate(tmp_path / "Attention.artifact", source=(module, (x,)))
    assert found.status == "ok"
    with pytest.raises(UsageError, match="was an object in memory"):
        linexport.validate(tmp_path / "Attention.artifact")
    other = Attention()
    with pytest.raises(UsageError, match="gives other weights"):
        linexport.validate(tmp_path / "Attention.artifact", source=(other, (x,)))


def test_examples_stand_behind_the_module_as_for_torch_export(tmp_path: Path) -> None:
    module, x, scale = Attention(), example(), {"scale": torch.ones(WIDTH)}
    convert: Any = linexport.convert  # type checkers hold callers to the names
    for i, examples in enumerate([((x,),), ((x,), scale), ((), {"x": x}), (x,)]):
        manifest = convert(module, *examples, output=tmp_path / str(i), bench=False, threads=1)
        assert manifest.status == "ok" and (tmp_path / str(i)).is_dir()
    with pytest.raises(UsageError, match="Found args behind the module and by name"):
        convert(module, (x,), args=(x,))
    with pytest.raises(UsageError, match="Found 4 arguments behind the module"):
        convert(module, (x,), {}, None, "artifact")


@pytest.mark.parametrize(
    "form",
    [
        lambda m: (m, (example(),)),
        lambda m: (m, (example(),), {"scale": torch.ones(WIDTH)}),
        lambda m: (m, (), {"scale": torch.ones(WIDTH), "x": example()}),
        lambda m: lambda: (m, (example(),)),
        lambda m: with_examples(m, example(), None, None),
        lambda m: with_examples(m, None, {"x": example()}, {"x": {1: Dim.DYNAMIC}}),
        exported,
    ],
)
def test_every_form_of_a_module_is_taken(form: Any) -> None:
    module = Attention()
    loaded = load_model(form(module))
    assert loaded.source.kind == "object" and loaded.source.sha256 is None
    assert loaded.source.weights_sha256
    x = example()
    given = {n: torch.ones(WIDTH) for n in ("scale",) if "scale" in loaded.kwargs}
    if len(loaded.args) > 1:
        given = {"scale": torch.ones(WIDTH)}
    with torch.no_grad():
        assert torch.equal(loaded.module(x, **given), module(x))


class Doubling(Attention):
    """Changes its input in place, and keeps what it computed."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x.mul_(2), scale)


def test_examples_are_not_changed_and_a_function_without_a_name_has_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x = example()
    kept = x.clone()
    try:
        manifest = linexport.convert(lambda: (Doubling(), (x,)), bench=False, threads=1)
        assert manifest.artifact == "Doubling.artifact"
    finally:
        assert torch.equal(x, kept)
    assert load_model((Attention(), (x.requires_grad_(),))).args[0].requires_grad is False


def test_nothing_varies_where_dynamic_shapes_are_empty() -> None:
    loaded = load_model(with_examples(Attention(), (example(),), None, {}))
    assert loaded.dynamic_shapes is None


def test_a_vector_of_another_size_is_not_of_the_batch() -> None:
    loaded = load_model((Attention(), (example(), torch.ones(WIDTH))))
    assert loaded.dynamic_shapes == ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, None)


def test_a_language_model_says_itself_how_it_is_called() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_5_text", **TINY["qwen3_5_text"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded = load_model(model)
    assert loaded.language is not None and loaded.source.kind == "object"
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Attention(), r"Attention has no example inputs. Give them: args="),
        (Attention, "Found the class Attention. Expected the path"),
        (Attention().state_dict(), "Found an object of the type OrderedDict"),
        (None, "type NoneType"),
        (7, "type int"),
        ([Attention(), (example(),)], "type list"),
        ((Attention(),), "Found a tuple of 1"),
        ((1, 2), "Found a tuple of int, int"),
        ((), "Found a tuple of nothing"),
        (example(), "type Tensor"),
        (lambda: 3, "type int"),
        (lambda: {}["x"], r"failed at .*test_load_objects.py"),
    ],
)
def test_anything_else_is_refused_with_the_ways_in(source: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        linexport.convert(source, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_examples_go_with_a_module(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Call it in the forward of a module and give that"):
        linexport.convert(lambda x: x, args=(torch.ones(2, 3),))
    with pytest.raises(UsageError, match=r"go with a torch.nn.Module; found .* type str"):
        linexport.convert("model.pt", tmp_path / "artifact", args=(example(),))
    with pytest.raises(UsageError, match="loads the model in another process"):
        linexport.convert(Attention(), tmp_path / "artifact", args=(example(),), isolated=True)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = Attention()
    module.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be copied .* Give a function"):
        load_model((module, (example(),)))


class Kept(Attention):
    """Attention with a weight, a table and a map that autograd knows the origin of."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.utils.weight_norm(self.project, dim=None)
        self.out = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.tables = [self.scale.exp()]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.last = super().forward(x, scale)
        return self.out(self.last) * self.tables[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # weight_norm is the old one on purpose
def test_a_module_that_keeps_what_it_computed_converts(tmp_path: Path) -> None:
    module = Kept()
    module(example()).sum().backward()
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        manifest = linexport.convert(module, tmp_path / "a", args=(example(),), bench=False)
    assert manifest.status == "ok" and "streams" in repr(manifest)
    assert not any("float64" in warning for warning in manifest.warnings)
    assert module.project.weight.grad_fn and module.tables[0].grad_fn, "the original is as it was"
    x = torch.randn(3, 37, WIDTH)
    with torch.no_grad():
        expected = copied(module).double()
        expected.tables = [expected.scale.exp()]
        y = expected(x.double()).numpy()
    found = manifest.load().run(x.numpy())["output"]
    np.testing.assert_allclose(found, y, atol=1e-5 * np.abs(y).max())
