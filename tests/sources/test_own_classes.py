"""file.py:Class with weights of a file and sizes of inputs, and the command that says so."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linexport
from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.option_names import shown_as_flags
from linexport.sources import example_inputs, load_model
from linexport.trace import trace

NET = """
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.tril(q @ k.mT) @ v


class Net(nn.Module):
    def __init__(self, width=8, rows=50):
        super().__init__()
        self.words = nn.Embedding(rows, width)
        self.layers = nn.ModuleList([Mixer(width)])
        self.register_buffer("scale", torch.ones(width))

    def forward(self, ids, mask, *, shift=None):
        x = self.words(ids) * self.scale * mask[..., None]
        return x + self.layers[0](x) + (0 if shift is None else shift)


class ModelConfig:
    def __init__(self, width=8, rows=50):
        self.width, self.rows = width, rows


WIDE = ModelConfig(width=24)


class Tied(nn.Module):
    def __init__(self, config: "ModelConfig", act=None):
        super().__init__()
        self.act = act
        self.words = nn.Embedding(config.rows, config.width)
        self.head = nn.Linear(config.width, config.rows, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, key_mask=None):
        x = self.words(ids)
        return self.head(torch.tril(x @ x.mT) @ x)


class Wraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, ids, count):
        return self.net(ids + count[:, None], torch.ones_like(ids, dtype=torch.bool))


class Pixels(nn.Module):
    def forward(self, image, scale, *, shift=None):
        q, k, v = image.flatten(2).chunk(3, 1)
        out = v @ (k.mT @ q) * scale[:, None, None]
        return out if shift is None else out + shift.flatten(1)[:, None]


def bare():
    return Mixer(8)


def whole():
    return Mixer(8), (torch.randn(2, 5, 8),)
"""
INPUTS = ("ids=int64[2,5]", "mask=bool[2,5]")


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a file net.py in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    Path("net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    import net  # type: ignore[import-not-found]

    yield net
    sys.modules.pop("net", None)


def saved(net: Any, form: str) -> torch.nn.Module:
    """Write weights.pt in one of the forms that people have; return the module."""
    torch.manual_seed(7)
    model = net.Net()
    weights = model.state_dict()
    if form == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(weights, "weights.pt")
        return model
    forms = {
        "state_dict": weights,
        "checkpoint": {"epoch": 3, "model": weights, "optimizer": {"state": {}}},
        "wrapped": {f"module._orig_mod.{name}": value for name, value in weights.items()},
        "module": model,
        "module in a checkpoint": {"epoch": 3, "model": model},
    }
    torch.save(forms[form], "weights.pt")
    return model


FORMS = (
    "state_dict",
    "checkpoint",
    "wrapped",
    "module",
    "module in a checkpoint",
    "safetensors",
)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_a_file_are_those_of_the_class(net: Any, form: str) -> None:
    model = saved(net, form)
    loaded = load_model("net.py:Net", state_dict="weights.pt", inputs=INPUTS)
    found = loaded.module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert torch.equal(loaded.module(*loaded.args), model.eval()(*loaded.args))


@pytest.mark.parametrize("form", FORMS)
def test_weights_alone_are_answered_with_the_command_that_takes_them(net: Any, form: str) -> None:
    saved(net, form)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model("weights.pt")
    with shown_as_flags():
        lines = str(caught.value).splitlines()
    [line] = [x for x in lines if x.startswith("  linexport")]
    _, _, source, *options = shlex.split(line)
    assert source == "net.py:Net"
    pairs = list(zip(options[::2], options[1::2], strict=True))
    assert pairs[0] == ("--state-dict", "weights.pt")
    inputs = [value for flag, value in pairs if flag == "--input"]
    assert load_model(source, state_dict="weights.pt", inputs=inputs).args[0].shape == (2, 16)


def test_a_pickled_module_runs_nothing(net: Any) -> None:
    Path("marker.py").write_text("open('ran', 'w').close()\nclass Evil:\n    pass\n")
    import marker  # type: ignore[import-not-found]

    model = net.Net()
    model.extra = marker.Evil()
    torch.save(model, "weights.pt")
    Path("ran").unlink()
    for name in ("marker", "net"):
        del sys.modules[name]
    with pytest.raises(UnsupportedModelError, match=r"net\.py:Net"):
        load_model("weights.pt")
    assert "net" not in sys.modules
    load_model("net.py:Net", state_dict="weights.pt", inputs=INPUTS)
    assert not Path("ran").exists()


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self.reduced = function, given

    def __reduce__(self) -> Any:
        return self.reduced


def test_calls_in_a_pickle_are_not_made(net: Any) -> None:
    model = net.Net()
    model.extra = Calls(open, "ran", "w")
    torch.save(model, "weights.pt")
    load_model("net.py:Net", state_dict="weights.pt", inputs=INPUTS)
    assert not Path("ran").exists()
    torch.load("weights.pt", weights_only=False)
    assert Path("ran").exists()  # the control: the pickle works


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("scale"), "scale is missing"),
        (lambda w: w.update(more=torch.ones(2)), "more is not in the model"),
        (lambda w: w.update(scale=torch.ones(9)), r"scale has shape \(9,\), expected \(8,\)"),
        (lambda w: w.update(scale=torch.ones(8, dtype=torch.int64)), "scale has the type int64"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    net: Any, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    weights = dict(net.Net().state_dict())
    change(weights)
    torch.save(weights, "weights.pt")
    with pytest.raises(UsageError, match=said) as caught:
        load_model("net.py:Net", state_dict="weights.pt", inputs=INPUTS)
    assert "'net.py:Net(width=" in str(caught.value)


def test_sizes_of_weights_are_those_of_the_constructor(net: Any) -> None:
    torch.save(net.Net(width=24, rows=9).state_dict(), "weights.pt")
    with pytest.raises(UsageError, match=r"they are of 'net\.py:Net\(width=24, rows=9\)'\."):
        load_model("net.py:Net", state_dict="weights.pt", inputs=INPUTS)
    with pytest.raises(UsageError, match=r"the arguments it had: 'net\.py:Net\(width=\.\.\., "):
        load_model("net.py:Net(3, 3)", state_dict="weights.pt", inputs=INPUTS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        ([1, 2], "a list without weights"),
        ({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, "several state_dicts: a, b"),
        (b"words", "not weights"),
        (b"PK\3\4", "not weights"),
    ],
)
def test_other_files_of_weights_are_refused(net: Any, content: Any, said: str) -> None:
    if isinstance(content, bytes):
        Path("weights.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, "weights.pt")
    with pytest.raises(LinexportError, match=said):
        load_model("net.py:Net", state_dict="weights.pt", inputs=INPUTS)


def test_arguments_of_a_class_are_literals(net: Any) -> None:
    loaded = load_model("net.py:Net(16, rows=9)", inputs=INPUTS)
    assert loaded.module.words.weight.shape == (9, 16)
    for text in ("(width=open('x'))", "(8)(9)", "(**{})", "(width=...)", "(", "(rows)"):
        with pytest.raises(UsageError, match=r"not all literals|neither a file|there is no"):
            load_model(f"net.py:Net{text}", inputs=INPUTS)
    for text in ("(ModelConfig(...))", "(ModelConfig(width=Missing()))", "(Missing)"):
        with pytest.raises(UsageError, match=r"not all literals|there is no 'Missing'"):
            load_model(f"net.py:Tied{text}", inputs=INPUTS)
    with pytest.raises(UsageError, match=r"'net.py:Mixer\(width=\.\.\.\)'"):
        load_model("net.py:Mixer", inputs=["x=float32[2,5,8]"])


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("Tied(ModelConfig())", (50, 8)),
        ("Tied(config=ModelConfig(width=4, rows=9), act=torch.relu)", (9, 4)),
        ("Tied(ModelConfig(width=2))", (50, 2)),
        ("Tied(WIDE)", (50, 24)),
    ],
)
def test_arguments_may_be_names_and_classes_of_the_same_file(
    net: Any, text: str, sizes: tuple[int, int]
) -> None:
    loaded = load_model(f"net.py:{text}", inputs=INPUTS[:1])
    assert loaded.module.words.weight.shape == sizes


def test_weights_that_are_drawn_by_an_argument_are_those_of_the_seed(net: Any) -> None:
    Path("outer.py").write_text(
        "from net import Mixer\n\n"
        "class Outer(Mixer):\n"
        "    def __init__(self, inner):\n"
        "        super().__init__(8)\n"
        "        self.qkv = inner.qkv\n"
    )
    first, again = (
        load_model("outer.py:Outer(Mixer(8))", inputs=["x=float32[2,5,8]"]) for _ in range(2)
    )
    assert torch.equal(first.module.qkv.weight, again.module.qkv.weight)
    assert any("--state-dict FILE" in warning for warning in first.warnings)


def test_a_config_object_is_filled_into_the_command(net: Any) -> None:
    torch.save(net.Tied(net.ModelConfig()).state_dict(), "weights.pt")
    with pytest.raises(UnsupportedModelError) as caught:
        load_model("weights.pt")
    line, advice = str(caught.value).splitlines()[-2:]
    assert '"net.py:Tied(config=ModelConfig())", state_dict="weights.pt"' in line
    assert advice == (
        "Check the sizes (a guess) and add inputs 'key_mask=bool[2,16]' if you use it."
    )
    with pytest.raises(UsageError, match=r"as in 'net\.py:Tied\(config=ModelConfig\(\)\)'"):
        load_model("net.py:Tied", inputs=INPUTS[:1])


@pytest.mark.parametrize("left_out", ["head.weight", "words.weight"])
def test_a_tied_tensor_may_be_left_out_of_a_file(net: Any, left_out: str) -> None:
    model = net.Tied(net.ModelConfig())
    weights = dict(model.state_dict())
    del weights[left_out]
    torch.save(weights, "weights.pt")
    loaded = load_model(
        "net.py:Tied(ModelConfig())", state_dict="weights.pt", inputs=INPUTS[:1]
    ).module
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert loaded.head.weight is loaded.words.weight


def test_what_save_model_of_safetensors_wrote_is_taken(net: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = net.Tied(net.ModelConfig())
    safetensors.save_model(model, "weights.safetensors")
    loaded = load_model(
        "net.py:Tied(ModelConfig())", state_dict="weights.safetensors", inputs=INPUTS[:1]
    )
    assert torch.equal(loaded.module.head.weight, model.head.weight)


def test_two_values_of_a_tied_tensor_do_not_fit(net: Any) -> None:
    weights = dict(net.Tied(net.ModelConfig()).state_dict())
    weights["head.weight"] = weights["head.weight"] + 1
    torch.save(weights, "weights.pt")
    with pytest.raises(UsageError, match=r"words\.weight and head\.weight are one tensor"):
        load_model("net.py:Tied(ModelConfig())", state_dict="weights.pt", inputs=INPUTS[:1])


def test_weights_of_another_size_than_a_function_returns_name_the_function(net: Any) -> None:
    torch.save({"other": torch.ones(2)}, "weights.pt")
    with pytest.raises(UsageError, match=r"Let net\.py:bare return the Mixer that"):
        load_model("net.py:bare", state_dict="weights.pt", inputs=["x=float32[2,5,8]"])


def test_ids_are_rows_of_their_embedding(net: Any) -> None:
    loaded = load_model("net.py:Net(rows=7)", inputs=INPUTS)
    assert loaded.integer_ranges == {0: (0, 7)}
    assert int(loaded.args[0].max()) < 7


def test_integers_that_no_embedding_takes_need_a_limit(net: Any) -> None:
    given = ["ids=int64[2,5]:3", "count=int64[2]"]
    with pytest.raises(UsageError, match=r"inputs count=int64\[2\]:1000"):
        load_model("net.py:Wraps", inputs=given)
    loaded = load_model("net.py:Wraps", inputs=[given[0], "count=int64[2]:40"])
    assert loaded.integer_ranges == {0: (0, 3), 1: (0, 40)}


GRAPH = """
import torch


class Graph(torch.nn.Module):
    def forward(self, x, edges):
        row, column = edges
        return torch.zeros_like(x).index_add_(0, column, x[row])
"""


def test_integers_below_a_size_are_places_at_every_size(net: Any, tmp_path: Path) -> None:
    Path("graph.py").write_text(GRAPH)
    given = ["x=float32[nodes=30,4]", "edges=int64[2,links=60]:nodes"]
    made = linexport.convert("graph.py:Graph", inputs=given, output=tmp_path / "out", bench=False)
    assert made.status == "ok" and {"nodes", "links"} <= set(made.dims)
    random = np.random.default_rng(0)
    x, edges = random.standard_normal((5, 4)).astype(np.float32), random.integers(0, 5, (2, 90))
    expected = np.zeros((5, 4))
    np.add.at(expected, edges[1], x[edges[0]].astype(np.float64))
    (found,) = made.load().run(x=x, edges=edges).values()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("limit", ["links", "others"])
def test_a_limit_is_a_number_or_a_size_that_varies_by_one(net: Any, limit: str) -> None:
    Path("graph.py").write_text(GRAPH)
    given = ["x=float32[nodes=30,4]", f"edges=int64[2,links=2*30]:{limit}"]
    with pytest.raises(UsageError, match=f"found the limit {limit}; expected .*: nodes"):
        load_model("graph.py:Graph", inputs=given)


def test_inputs_are_those_of_the_seed(net: Any) -> None:
    first, again, other = (
        load_model("net.py:Mixer(8)", inputs=["x=float32[2,5,8]"], seed=seed).args[0]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_inputs_by_name_alone_come_last(net: Any) -> None:
    loaded = load_model("net.py:Net", inputs=["shift=float32[8]", *INPUTS])
    assert [x.dtype for x in loaded.args] == [torch.int64, torch.bool]
    assert list(loaded.kwargs) == ["shift"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((), r'linexport.convert\("net.py:Net", inputs=\["ids=int64\[2,16\]", "mask=bool'),
        (INPUTS[:1], "no inputs for mask; its forward takes ids, mask, shift"),
        ((*INPUTS, "x=bool[2]"), "no parameter x"),
        ((*INPUTS, INPUTS[0]), "ids is given twice"),
        (("ids=int64[2,500000000000]", INPUTS[1]), "cannot be drawn"),
        (("ids=float32[2,5]", INPUTS[1]), "the model itself fails"),
    ],
)
def test_inputs_that_do_not_fit_are_named(net: Any, inputs: tuple[str, ...], said: str) -> None:
    with pytest.raises(LinexportError, match=said):
        load_model("net.py:Net", inputs=inputs)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "not of the form"),
        ("x=float32", "not of the form"),
        ("x=float32[2,a]", "positive integers"),
        ("x=float32[2,0]", "positive integers"),
        ("x=float32[2,,3]", "positive integers"),
        ("x=float32[2*3]", "positive integers"),
        ("x=float32[n=0*3]", "with a name where they vary"),
        ("x=float[2,3]", "found the type float; expected float32"),
        ("x=float32[2]:9", "is for integers"),
        ("x=int64[2]:0", "at least 1"),
    ],
)
def test_inputs_are_written_in_one_form(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        example_inputs.parse([text])


def test_sizes_with_a_name_vary(net: Any) -> None:
    given = (
        "image=float32[batch=2,6,height=4,width = 2 * 3]",
        "shift=float32[batch=2,1,height=4,width=2*3]",
        "scale=float32[batch=2]",
    )
    loaded = load_model("net.py:Pixels", inputs=given)
    assert [tuple(x.shape) for x in loaded.args] == [(2, 6, 4, 6), (2,)]
    traced = trace(loaded)
    assert {n: (r.batch, r.multiple) for n, r in traced.dims.items()} == {
        "batch": (True, 1),
        "height": (False, 1),
        "2*width": (False, 2),
    }
    sizes = traced.graph.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in sizes] == ["batch", 6, "height", "2*width"]
    [fixed] = load_model("net.py:Mixer(8)", inputs=["x=float32[2,tokens=9,8]"]).dynamic_shapes
    assert list(fixed) == [1]


def test_sizes_of_one_name_are_equal(net: Any) -> None:
    for other, found in (("n=5", "5"), ("n=2*2", "2\\*2")):
        inputs = ["image=float32[2,6,n=4,3]", f"scale=float32[{other}]"]
        with pytest.raises(UsageError, match=f"scale: n is {found} there and 4 elsewhere"):
            load_model("net.py:Pixels", inputs=inputs)


def test_a_function_may_return_a_module_alone(net: Any) -> None:
    loaded = load_model("net:bare", inputs=["x=float32[2,5,8]"])
    assert loaded.args[0].shape == (2, 5, 8)
    with pytest.raises(UsageError, match="Leave out inputs"):
        load_model("net:whole", inputs=["x=float32[2,5,8]"])


def test_other_sources_take_no_weights(net: Any) -> None:
    torch.save({}, "empty.pt")
    with pytest.raises(UsageError, match="state_dict goes with"):
        load_model("empty.pt", state_dict="weights.pt")
    with pytest.raises(UsageError, match="inputs goes with"):
        load_model(net.whole, inputs=INPUTS)


def test_files_are_imported_as_their_packages_do(net: Any) -> None:
    Path("own/inner").mkdir(parents=True)
    for folder in ("own", "own/inner"):
        Path(folder, "__init__.py").touch()
    Path("own/inner/model.py").write_text("from ..layers import Mixer as Net")
    Path("own/layers.py").write_text(NET)
    assert load_model("own/inner/model.py:Net(8)", inputs=["x=float32[2,5,8]"]).module is not None
    assert "own.inner.model" in sys.modules


@pytest.mark.parametrize("name", ["json.py", "my-net.py", "net.py"])
def test_a_file_is_taken_whatever_its_name(net: Any, name: str) -> None:
    Path("other").mkdir()
    Path("other", name).write_text(NET.replace("class Net", "class Own"))
    loaded = load_model(f"other/{name}:Own", inputs=INPUTS)
    assert type(loaded.module).__name__ == "Own"


def test_a_class_of_ones_own_is_converted_and_checked_again(net: Any) -> None:
    saved(net, "module")
    manifest = linexport.convert(
        "net.py:Net", state_dict="weights.pt", inputs=INPUTS, bench=False, threads=1
    )
    assert manifest.artifact == "Net.artifact"
    assert manifest.options.state_dict == "weights.pt"
    assert linexport.validate("Net.artifact", source="net.py:Net").status == "ok"
    torch.save(net.Net().state_dict(), "weights.pt")
    with pytest.raises(UsageError, match="gives other weights"):
        linexport.validate("Net.artifact", source="net.py:Net")
