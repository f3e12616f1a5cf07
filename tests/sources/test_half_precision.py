"""Modules in half precision: compared as they were given, and in float32."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.parity.reference.module import Reference
from linexport.sources import load_model
from linexport.sources.factory import load_module
from linexport.sources.half_precision import AsGiven, as_given, widened
from linexport.sources.objects import load_object
from linexport.trace import trace
from tests.support.independent import Independent, check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Inside(nn.Module):
    """Attention in bfloat16 between projections in float32."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, k, v = self.project(x).to(self.low).chunk(3, -1)
        q, k = q.relu() + 0.1, k.relu() + 0.1
        scores = torch.einsum("btd,bsd->bts", q, k).tril()
        return (scores @ v / scores.sum(-1, keepdim=True)).to(x.dtype)


class Methods(Inside):
    """The same by methods, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, k, v = (part.bfloat16() for part in self.project(x).chunk(3, -1))
        return (torch.einsum("btd,bsd->bts", q * self.scale, k).tril() @ v).float()


def example() -> tuple[Tensor]:
    return (torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.slow
def test_attention_in_bfloat16_is_fused_and_streams_in_float32(tmp_path: Path) -> None:
    model = load_module((Inside(), example()), "bfloat16:inside")
    manifest = linexport.convert(model, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused["LinearAttention"] == 1 and manifest.streaming.passed
    assert "computes in bfloat16" in manifest.warnings[0]
    assert all(t.dtype == "float32" for t in (*manifest.inputs, *manifest.outputs))
    check_independently(tmp_path / "a", Inside(torch.float32), WIDTH)
    x = np.random.default_rng(0).standard_normal((2, 99, WIDTH)).astype(np.float32)
    with torch.no_grad():
        as_written = Inside()(torch.from_numpy(x)).numpy()
    distance = np.abs(Independent(tmp_path / "a").pieces(x, [99]) - as_written).max()
    assert 1e-4 < distance / np.abs(as_written).max() < 2e-2  # 8 bits


def test_weights_buffers_inputs_and_methods_are_widened_and_copies_keep_their_weights() -> None:
    for module, args in ((Methods(), example()), (Inside().bfloat16(), (example()[0].bfloat16(),))):
        plain = copy.deepcopy(module).float()
        args, _, given, warnings = widened(module.eval(), args, {})
        assert given is not None and given.name == "bfloat16" and not given.is_kept
        assert "ONNX Runtime has no CPU kernels" in warnings[0]
        assert {x.dtype for x in (*module.state_dict().values(), *args)} == {torch.float32}
        other = copy.deepcopy(module).double()
        with torch.no_grad():
            other.project.weight.zero_()
            assert not torch.equal(other(args[0].double()).float(), module(args[0]))
        assert type(module).__name__ == type(plain).__name__
        assert widened(module, args, {}) == (args, {}, None, ())


class Automatic(Inside):
    """The same by contexts, one of them around a method, and with one that ends the others."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def projected(self, x: Tensor) -> Tensor:
        return self.project(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = self.projected(x).chunk(3, -1)
            scores = torch.einsum("btd,bsd->bts", q, k).tril()
            with torch.autocast("cpu", enabled=False):
                return scores.float() @ v.float()


def test_automatic_casts_to_bfloat16_do_nothing() -> None:
    module, (x,) = Automatic().eval(), example()
    q, k, v = module.project(x).chunk(3, -1)
    expected = torch.einsum("btd,bsd->bts", q, k).tril() @ v
    assert (module(x) - expected).abs().max() > 1e-3
    _, _, _, warnings = widened(module, (), {"x": x})
    assert "ONNX Runtime has no CPU kernels" in warnings[0]
    torch.testing.assert_close(module(x), expected)
    traced = trace(load_module((Automatic(), (x,)), "bfloat16:automatic"))
    assert onnx.TensorProto.BFLOAT16 not in {
        v.type.tensor_type.elem_type for v in traced.graph.graph.value_info
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):  # of others, it does what it did
        assert (x @ x.mT).dtype == torch.bfloat16


def test_a_module_in_float32_is_left_as_it_is() -> None:
    module, args = nn.Linear(2, 2), (torch.ones(1, 2),)
    assert widened(module, args, {}) == (args, {}, None, ()) and type(module) is nn.Linear


class OnGpu(Inside):
    """The same in regions that are those of a GPU, one of which ends the other."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        with torch.autocast("cuda"):
            q, k, v = self.project(x).chunk(3, -1)
            with torch.autocast("cuda", enabled=False):
                q, k = q.float().relu() + 0.1, k.float().relu() + 0.1
                scores = torch.einsum("btd,bsd->bts", q, k).tril()
            return (scores @ v / scores.sum(-1, keepdim=True)).float()


class OnCpu(Inside):
    """The same in regions of the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        with torch.autocast("cpu", self.low):
            q, k, v = self.project(x).chunk(3, -1)
            q, k = q.relu() + 0.1, k.relu() + 0.1
            scores = torch.einsum("btd,bsd->bts", q, k).tril()
            return (scores @ v / scores.sum(-1, keepdim=True)).float()


HALF = torch.float16
GIVEN: dict[str, tuple[Callable[[], nn.Module], torch.dtype, str]] = {
    "weights": (lambda: Inside(HALF).half(), HALF, "float16"),
    "code": (lambda: Inside(HALF), torch.float32, "float16"),
    "bfloat16 weights": (lambda: Inside().bfloat16(), torch.bfloat16, "bfloat16"),
    "regions": (lambda: OnCpu(HALF), torch.float32, "float16"),
    "bfloat16 regions": (OnCpu, torch.float32, "bfloat16"),
    "regions of a GPU": (OnGpu, torch.float32, "float16"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_references_are_the_module_as_given_and_the_same_in_float32(kind: str) -> None:
    build, taken, name = GIVEN[kind]
    (x,) = example()
    loaded = load_module((build(), (x.to(taken),)), "half:module")
    assert loaded.given is not None and loaded.given.name == name
    exact = Inside(torch.float32).double()
    exact.low = torch.float64
    if taken != torch.float32:
        exact.load_state_dict({n: t.double() for n, t in build().state_dict().items()})
        x = x.to(taken).float()
    expected = exact(x.double()).detach().numpy()
    given, single, double = (
        Reference(loaded, dtype)(((x.to(loaded.args[0].dtype),), {}))[0]
        for dtype in (loaded.given.dtype, torch.float32, torch.float64)
    )
    size = np.abs(expected).max()
    assert np.abs(double - expected).max() < 1e-12 * size
    assert np.abs(single - expected).max() < 1e-5 * size and single.dtype == np.float32
    assert 1e-5 * size < np.abs(given - expected).max() < 5e-2 * size
    if kind != "regions of a GPU":
        as_written = build()(x.to(taken)).detach().float().numpy()
        np.testing.assert_array_equal(given.astype(np.float32), as_written)


def test_regions_of_a_gpu_that_are_switched_off_are_none() -> None:
    class Off(Inside):
        def forward(self, x: Tensor) -> Tensor:
            with torch.cuda.amp.autocast(enabled=False):
                return super().forward(x)

    assert as_given(Off(torch.float32).eval(), example(), {}) is None
    found = as_given(OnGpu().eval(), (), {"x": example()[0]})
    assert isinstance(found, AsGiven) and found.on_gpu and not found.is_kept


DECORATED = """
import torch
from torch import nn


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.region = torch.autocast("cuda", dtype=torch.bfloat16)

    @torch.autocast("cuda", enabled=False)
    def attend(self, q, k, v):
        q, k = q.float().relu() + 0.1, k.float().relu() + 0.1
        return (q @ k.mT).tril() @ v.float()

    def both(self, x):
        return self.attend(*self.project(x).chunk(3, -1))

    @torch.autocast("cuda")
    def forward(self, x):
        return self.both(x)


class Old(Decorated):
    @torch.cuda.amp.autocast(dtype=torch.bfloat16)
    def forward(self, x):
        return self.both(x)


class Attribute(Decorated):
    def forward(self, x):
        with self.region, self.region:
            return self.both(x)


class Off(Decorated):
    def forward(self, x):
        return self.both(x)
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Decorated", HALF), ("Old", torch.bfloat16), ("Attribute", torch.bfloat16), ("Off", None)],
)
def test_regions_of_a_gpu_may_be_decorators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("regions.py").write_text(DECORATED)
    loaded = load_model(f"regions.py:{name}", inputs=["x=float32[2,12,8]"])
    sys.modules.pop("regions", None)
    assert (loaded.given and loaded.given.dtype) == dtype
    if loaded.given is None:
        return
    assert loaded.given.on_gpu and "on a GPU, in regions" in loaded.warnings[0]
    x, module = loaded.args[0], loaded.module
    found, single = (Reference(loaded, t)(((x,), {}))[0] for t in (dtype, torch.float32))
    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            parts = module.project(x).chunk(3, -1)
        expected = module.attend(*parts).numpy()
        np.testing.assert_allclose(single, module.both(x).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found, expected)
    assert 1e-5 < np.abs(found - single).max() / np.abs(single).max() < 5e-2


@pytest.mark.parametrize("module", [Inside(), Methods(), Automatic(), Inside().bfloat16()])
def test_an_exported_program_in_bfloat16_is_converted_in_float32(module: nn.Module) -> None:
    module = module.eval()
    (x,) = (x.to(next(module.parameters()).dtype) for x in example())
    dims = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    loaded = load_object(torch.export.export(module, (x,), dynamic_shapes=dims))
    assert loaded.given is not None and "bfloat16" in loaded.warnings[0]
    traced = trace(loaded)
    assert onnx.TensorProto.BFLOAT16 not in {
        v.type.tensor_type.elem_type for v in traced.graph.graph.value_info
    }
    args, _, _, _ = widened(module, (x,), {})
    torch.testing.assert_close(loaded.module(*loaded.args), module(*args))
    x = torch.randn(3, 7, WIDTH)
    torch.testing.assert_close(loaded.module(x), module(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "bfloat16 regions", "regions of a GPU"])
def test_artifacts_are_compared_in_half_precision_and_in_float32(kind: str, tmp_path: Path) -> None:
    build, taken, name = GIVEN[kind]
    model = load_module((build(), (example()[0].to(taken),)), "half:module")
    manifest = linexport.convert(model, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.parity is not None and manifest.fused["LinearAttention"] == 1
    assert {c.reference for c in manifest.parity.cases} == {name, "float32", "float64"}
    kept = name == "float16" and kind != "regions of a GPU"
    assert manifest.outputs[0].dtype == ("float16" if kept else "float32")
    assert (manifest.parity.max_relative_error < 5e-5) is not kept
