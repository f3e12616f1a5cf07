"""Private names of torch: in one folder, there in this torch, and not missed where gone."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import onnx
import pytest
import torch
from torch.export import Dim

from linexport.errors import EnvironmentProblemError
from linexport.system.torch_internals import (
    Internal,
    all_internals,
    exports,
    frames,
    operators,
    sizes,
)
from linexport.system.torch_internals.exports import work_left_out
from linexport.system.torch_internals.modules import Change, ConvertibleModule, change_tensors
from linexport.trace import user_frames
from linexport.trace.graph import to_onnx
from tests.support import ROOT

PRIVATE = re.compile(
    r"\btorch\.(\w+\.)*_[a-zA-Z]\w*|\bfrom torch[.\w]* import .*\b_[a-z]|_getframe|\._schema\b"
    r"|\.shape_env\b|\.node\.(expr|hint|int_)\b|SymInt\.__\w+__"
    r"|\"_(schema|opname|enabled)\"|_filter_traceback\w*|\._apply\(|def _apply\(self"
    r"|\.walk_tb\(\w*error"
)
"""Names that torch or Python do not promise."""

ALLOWED = re.compile(r"torch\._check\b|ops\.aten\._\w+|\btorch\._(utils|sym_sqrt)\b|torch\.__\w+__")
"""What is documented, an operator, or the name of something in a file that is only read."""


def uses(path: Path) -> list[str]:
    """Return the private names in the code of a file."""
    found = (m[0] for m in PRIVATE.finditer(path.read_text()))
    return [name for name in found if not ALLOWED.search(name)]


def test_nothing_else_uses_a_private_name_of_torch() -> None:
    folder = ROOT / "exporter/system/torch_internals"
    logs = {
        ROOT / "exporter/sources/exported_program.py": ["torch._export"],  # a log of that name
        ROOT / "exporter/system/extensions.py": [".walk_tb(error"],  # frames of an extension
    }
    for part in ("exporter", "models", "plugins"):
        for path in (ROOT / part).rglob("*.py"):
            if path.parent != folder and "sources" not in path.parts:
                assert uses(path) == logs.get(path, []), path
    assert uses(folder / "operators.py")


@pytest.mark.parametrize("internal", list(all_internals()), ids=lambda i: f"{i.module}.{i.name}")
def test_this_torch_has_every_private_name(internal: Internal) -> None:
    assert internal.need() is not None and internal.purpose
    assert internal.holder() is not None


def test_what_is_gone_is_named_with_the_releases_that_have_it() -> None:
    gone = Internal("torch.export", "no_such_name.at_all", "reads a test")
    with pytest.raises(
        EnvironmentProblemError,
        match=r"torch\.export\.no_such_name\.at_all, .* reads a test, does not exist\. torch 2",
    ):
        gone.need()
    assert gone.find() is gone.holder() is None


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("TRANSLATIONS", exports.translations_read_once),
        ("CONTROL_FLOW", exports.control_flow_as_it_is),
        ("FAKE_CACHE", exports.without_fake_cache),
    ],
)
def test_models_are_exported_without_names_that_have_a_slower_way(
    name: str, context: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(exports, name).without
    monkeypatch.setattr(exports, name, Internal("torch.no_module", "f", "is tested", "left alone"))
    with context():
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    assert program.module()(torch.ones(1, 2)).shape == (1, 2)


def test_sizes_are_restored_whatever_happens() -> None:
    before = {n: getattr(torch.SymInt, n) for n in (*sizes.COMPARED, "__index__", "__int__")}
    with (
        pytest.raises(RuntimeError, match="on the way"),
        sizes.counting_by(lambda _: 0),
        sizes.comparing_by(lambda *_: True),
    ):
        assert torch.SymInt.__int__ is not before["__int__"]
        raise RuntimeError("on the way")
    assert {n: getattr(torch.SymInt, n) for n in before} == before


def test_arguments_of_operators_are_known_by_name() -> None:
    found = operators.arguments(torch.ops.aten.topk.default, ("x", 3), {"largest": False})
    assert found == {"self": "x", "k": 3, "dim": -1, "largest": False, "sorted": True}
    assert operators.name_of(torch.ops.aten.topk.default) == "aten::topk"
    assert operators.makes_values(torch.ops.aten.add.Tensor)
    assert not operators.makes_values(torch.ops.aten.view.default)
    assert operators.has_kernel(torch.ops.aten.add.Tensor) and not operators.has_kernel(len)


class Mixed(torch.nn.Module):
    """Numbers of several types in one operator, before and behind a branch; composite operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4))

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        x = self.linear(x) + positions[:, None] * self.steps / 3 + 1
        x = torch.where(x > 0, x**2, torch.tensor(2)) + (x > 1) + x.half() * self.steps
        branches = lambda y: y * self.steps, lambda y: y - positions[:, None]
        x = torch.cond(x.sum() > 0, *branches, (x,))
        return torch.nn.functional.gelu(x), positions.sum() / x.shape[0], x.double() + x


def exported() -> onnx.ModelProto:
    dims = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    torch.manual_seed(0)
    module, example = Mixed().eval(), (torch.randn(2, 5, 4),)
    return to_onnx(torch.export.export(module, example, dynamic_shapes=dims))


def unnumbered(model: onnx.ModelProto) -> str:
    """Everything in a model, without the numbers that torch gives to code it makes."""
    return re.sub(r"<eval_with_key>\.\d+", "", str(model))


def test_programs_are_translated_to_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = exported()
    assert {"Cast", "If", "Gelu"} <= {node.op_type for node in found.graph.node}
    monkeypatch.setattr(exports, "CHANGES", ())
    assert unnumbered(found) == unnumbered(exported())


def test_every_place_is_changed_and_restored() -> None:
    places = [internal for internal, _ in exports.CHANGES]
    before = [internal.find() for internal in places]
    with work_left_out():
        inside = [internal.find() for internal in places]
    assert all(a is not b for a, b in zip(before, inside, strict=True))
    assert all(internal.find() is a for internal, a in zip(places, before, strict=True))
    keys = {key.name for key in [*inside[1], *inside[2]]}
    assert {"CPU", "CUDA", "Meta", "AutogradCPU"} <= keys and "XLA" not in keys


def test_places_that_torch_does_not_have_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("torch.export", "no_module_of.that_name"), ("torch.no_module", "f")
    missing = [(Internal(*name, "is tested", exports.SLOWER), len) for name in names]
    monkeypatch.setattr(exports, "CHANGES", missing)
    with work_left_out():
        assert not hasattr(torch.export, "no_module_of")


def test_the_attribute_of_a_size_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "NODE", Internal("torch.fx", "SymNode", "reads a size"))

    class Size:
        node = object()

    with pytest.raises(
        EnvironmentProblemError, match=r"torch\.fx\.SymNode\.expr, by which .* not exist"
    ):
        sizes.expression(Size())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [part.name for part in exports.PROMOTING])
def test_types_are_promoted_as_torch_does_where_a_part_of_that_is_gone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Internal(exports.PROMOTION.module, f"{name}_of_old", "is tested")
    monkeypatch.setattr(exports, "PROMOTING", (gone,))
    assert exports._promoted(len) is len


def test_modules_convert_what_torch_does_not_know() -> None:
    class Counting(ConvertibleModule):
        def converted(self, change: Change, plain: Callable[[], object]) -> None:
            plain()
            self.seen = change(torch.ones(1)).dtype

    inner = Counting()
    inner.register_buffer("steps", torch.ones(2))
    outer = torch.nn.Sequential(inner)
    assert outer.double() is outer
    assert inner.seen == inner.steps.dtype == torch.float64
    change_tensors(outer, lambda x: x.half())
    assert inner.seen == inner.steps.dtype == torch.float16


def test_the_line_of_forward_is_kept_where_torch_has_no_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "FILTER", Internal("torch.fx.proxy", "Tracer.gone", "is tested"))
    with frames.kept(lambda _, found: found * 2):
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    assert any(node.meta.get("stack_trace") for node in program.graph.nodes)


def test_frames_are_those_that_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read without those of torch, which its filter leaves out."""

    class Called(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(super().forward(x))

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.relu(x) * 2

    def found() -> list[str | None]:
        with user_frames.kept():
            program = torch.export.export(Called(torch.nn.Linear(2, 2)), (torch.ones(1, 2),))
        return [node.meta.get("stack_trace") for node in program.graph.nodes]

    read = found()
    assert any(text and "in twice" in text for text in read)
    monkeypatch.setattr(frames, "STACK", Internal("torch.fx.proxy", "gone", "is tested"))
    assert found() == read
