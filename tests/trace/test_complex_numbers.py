"""Complex tensors inside of models, which become pairs of real ones.

The oracle is the module itself in complex128, at lengths that were not traced.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport import passes
from linexport.errors import UnsupportedModelError
from linexport.parity.reference.module import Reference
from linexport.plugins.ops.registry import attach_functions
from linexport.sources.factory import load_module
from linexport.trace import Traced, trace
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 4
Function = Callable[[Tensor, Tensor, Tensor], Tensor]

ELEMENTWISE: dict[str, Function] = {
    "sum": lambda z, w, x: torch.add(z, w, alpha=3) - x + 2j,
    "difference from a number": lambda z, w, x: 1 - z,
    "product": lambda z, w, x: (2 - 3j) * z * w * x,
    "quotient": lambda z, w, x: z / w,
    "quotient of reals": lambda z, w, x: (z / (x.abs() + 1)) + 2 / (z + 9),
    "imaginary": lambda z, w, x: torch.exp(1j * x) * (x / (2j * x + 1)),
    "exponential": lambda z, w, x: torch.exp(z),
    "logarithm": lambda z, w, x: torch.log(z),
    "logarithm of reals": lambda z, w, x: torch.log(x.to(z.dtype)),
    "root": lambda z, w, x: torch.sqrt(z),
    "square": lambda z, w, x: z.square() + z**3 + z**-1,
    "size": lambda z, w, x: z.abs(),
    "angle": lambda z, w, x: z.angle(),
    "direction": lambda z, w, x: z.sgn(),
    "conjugate": lambda z, w, x: z.conj() * w + (-z).mH.mH,
    "polar": lambda z, w, x: torch.polar(x.abs(), x),
    "complex": lambda z, w, x: torch.complex(x, torch.zeros_like(x)) * z,
    "parts": lambda z, w, x: z.real * z.imag + torch.view_as_real(z)[..., 0],
    "wider": lambda z, w, x: (z.to(torch.complex128) * 1j).real.to(x.dtype),
    "broadcast": lambda z, w, x: (x[:, :, :1] + 1j * x[:, :1]).mT,
}

POWERS: dict[str, Function] = {
    "of positions": lambda z, w, x: z ** torch.arange(x.shape[1])[:, None],
    "of fractions": lambda z, w, x: z**0.3,
    "of reals": lambda z, w, x: z ** x.abs(),
    "of complex numbers": lambda z, w, x: z**w,
    "of a number": lambda z, w, x: 2**z,
    "cumulative sums": lambda z, w, x: z.cumsum(1),
    "cumulative products": lambda z, w, x: z.sgn().cumprod(1),
    "all factors": lambda z, w, x: z.prod(-1),
    "means": lambda z, w, x: z.mean(-1, keepdim=True) + z.sum(1, keepdim=True),
}

PRODUCTS: dict[str, Function] = {
    "matrices": lambda z, w, x: z @ w.mT,
    "real matrices": lambda z, w, x: z @ x.mT.to(z.dtype),
    "adjoints": lambda z, w, x: torch.bmm(z, w.mH),
    "einsum": lambda z, w, x: torch.einsum("btd,bsd,bsd->bts", z, w, z),
    "linear": lambda z, w, x: F.linear(z, torch.eye(4, dtype=z.dtype) * (1 + 2j), 1j * z[0, 0]),
    "added": lambda z, w, x: torch.addmm(w[0], z[0], torch.eye(4, dtype=z.dtype), alpha=2),
    "outer": lambda z, w, x: torch.outer(z[0, 0], w[0, 0]) + torch.vdot(z[0, 0], w[0, 0]),
    "a constant": lambda z, w, x: z * torch.tensor([1j, 2, 3 - 1j, 0], dtype=z.dtype),
    "transform": lambda z, w, x: torch.fft.ifft(torch.fft.fft(z * 2, dim=1) * 1j, dim=1),
}

LAYOUT: dict[str, Function] = {
    "shapes": lambda z, w, x: z.reshape(z.shape[0], -1, 2)[:, :, None].expand(-1, -1, 3, -1),
    "order": lambda z, w, x: z.permute(2, 0, 1).transpose(0, 1).flip(1),
    "parts": lambda z, w, x: z[:, 1::2, None] + w[:, -1:, None],
    "rows": lambda z, w, x: z[:, torch.tensor([1, 0, 0])] + w.gather(2, (x > 0).long())[:, :1],
    "pieces": lambda z, w, x: torch.cat([*z.chunk(2, -1)[::-1], z.split([1, 3], -1)[1]], -1),
    "joined": lambda z, w, x: torch.cat([torch.stack([z, w], 1), x.to(z.dtype)[:, None]], 1),
    "repeated": lambda z, w, x: z.repeat(1, 1, 2).roll(1, 1) + z.unbind(-1)[2][..., None],
    "padded": lambda z, w, x: F.pad(z, (0, 0, 2, 0), value=1.5),
    "chosen": lambda z, w, x: torch.where(x > 0, z, w) + torch.where(x > 1, z, x),
    "masked": lambda z, w, x: z.masked_fill(x > 0, 0) + (z @ w.mT).tril()[..., :1],
    "made": lambda z, w, x: torch.ones_like(z) * w + z.new_zeros(4) + torch.full_like(z, 1 - 2j),
    "expanded": lambda z, w, x: (x[..., :1] + 1j * x[:, :1]).reshape(x.shape[0], -1),
    "neighbours": lambda z, w, x: (x.view(z.dtype) + z[..., :2]).view(x.dtype),
    "written": lambda z, w, x: torch.zeros_like(z).index_put((torch.tensor([0]),), w[:1]),
}


def special(shape: tuple[int, ...]) -> Tensor:
    """Zeros, numbers on the axes, and numbers whose squares are none of float32."""
    values = [0.0, 1.0, -1.0, 2.0, 1e-25, -1e-25]
    return torch.tensor(np.random.default_rng(1).choice(values, shape).astype(np.float32))


class Several(nn.Module):
    """The results of functions of two complex tensors and a real one, in one input."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x):
        pairs = x[..., : 4 * WIDTH].reshape(*x.shape[:-1], 2, WIDTH, 2)
        z, w = torch.view_as_complex(pairs).unbind(2)
        found = [function(z, w, x[..., 4 * WIDTH :]) for function in self.functions]
        return tuple(torch.view_as_real(y) if y.is_complex() else y for y in found)


def traced(module: nn.Module, width: int = WIDTH, length: int | None = None) -> Traced:
    """Trace a module, with any number of tokens where none is given."""
    example = torch.randn(3, length or 16, width)
    dynamic = ({} if length else {1: Dim.DYNAMIC},)
    return trace(load_module((module, (example,), dynamic), "complex:layer"))


def run(model: onnx.ModelProto, x: Tensor) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


@pytest.mark.parametrize(
    ("functions", "length"),
    [(ELEMENTWISE, 7), (POWERS, 7), (PRODUCTS, None), (LAYOUT, None)],
    ids=["elementwise", "powers", "products", "layout"],
)
def test_functions_are_those_of_complex_numbers(
    functions: dict[str, Function], length: int | None
) -> None:
    module = Several(*functions.values())
    model = traced(module, 5 * WIDTH, length).model
    torch.manual_seed(0)
    for make in (torch.randn, special) if functions is ELEMENTWISE else (torch.randn,):
        x = make((3, 7, 5 * WIDTH))
        expected = [y.numpy() for y in module(x.double())]
        for name, e, got in zip(functions, expected, run(model, x), strict=True):
            assert got.shape == e.shape, name
            # What is no number, or none of float32, is left out.
            counted = np.isfinite(e) & (np.abs(e) < 1e38)
            allowed = 1e-5 * np.maximum(1, np.abs(e))
            with np.errstate(invalid="ignore"):
                wrong = counted & ~(np.abs(got - e) <= allowed)
            assert not wrong.any(), (name, e[wrong][:3], got[wrong][:3])


class ComplexWeights(nn.Module):
    """A loop with complex parameters, of which one is read twice, and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(WIDTH, 8, dtype=torch.complex64))
        self.c = nn.Parameter(torch.randn(8, WIDTH, dtype=torch.complex64))
        rates = torch.polar(torch.linspace(0.5, 0.99, 8), torch.linspace(0, 3, 8))
        self.register_buffer("rates", rates)

    def forward(self, x):
        state, out = torch.zeros(x.shape[0], 8, dtype=self.b.dtype), []
        for t in range(x.shape[1]):
            state = self.rates * state + x[:, t].to(self.b.dtype) @ self.b
            out.append((state @ self.c).real)
        return torch.stack(out, 1)


def test_a_loop_over_complex_states_is_fused_and_streams(tmp_path: Path) -> None:
    module = ComplexWeights()
    loaded = load_module((module, (torch.randn(2, 12, WIDTH),)), "complex:layer")
    manifest = linexport.convert(loaded, tmp_path / "a", bench=False, threads=1)
    assert len(manifest.fused) == 1 and manifest.streaming is not None
    exact = copy.deepcopy(module)._apply(lambda weight: weight.to(torch.complex128))
    check_independently(tmp_path / "a", exact, WIDTH, lengths=(1, 130))


def test_the_reference_of_complex_weights_is_in_complex128() -> None:
    loaded = load_module((ComplexWeights(), (torch.randn(2, 12, WIDTH),)), "complex:layer")
    x = torch.randn(2, 5, WIDTH)
    (found,) = Reference(loaded, torch.float64)(((x,), {}))
    rates, b, c = (
        w.detach().numpy().astype(complex)
        for w in (loaded.module.rates, loaded.module.b, loaded.module.c)
    )
    added = x.numpy().astype(complex) @ b
    state = np.zeros_like(added[:, 0])
    for t in range(5):
        state = rates * state + added[:, t]
        np.testing.assert_allclose(found[:, t], (state @ c).real, rtol=0, atol=1e-12)


class DiagonalStateSpace(nn.Module):
    """S4D: a kernel of complex rates, convolved by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(WIDTH, 8, 2))
        self.step = nn.Parameter(torch.linspace(-4, -2, WIDTH))
        self.size = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, 8)))
        self.turn = nn.Parameter(math.pi * torch.arange(8).float().repeat(WIDTH, 1))

    def forward(self, x):
        length = x.shape[1]
        rates = -torch.exp(self.size) + 1j * self.turn
        turned = rates * torch.exp(self.step)[:, None]
        c = torch.view_as_complex(self.c) * (torch.exp(turned) - 1.0) / rates
        powers = torch.exp(turned[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn, hnl -> hl", c, powers).real
        spectrum = torch.fft.rfft(x.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT


def test_complex_kernels_leave_transforms_to_torch_and_are_fused() -> None:
    module = DiagonalStateSpace()
    found = traced(module)
    left = [
        node.target
        for node in found.translated.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor) and value.is_complex()
    ]
    aten = torch.ops.aten
    assert left == [aten._fft_r2c.default, aten._fft_r2c.default, aten.mul.Tensor]
    counts = {op: sum(n.op_type == op for n in found.graph.graph.node) for op in ("Cos", "Sin")}
    assert counts == {"Cos": 2, "Sin": 2}
    rewritten = passes.run(found.model, passes.STATELESS)
    assert [n.op_type for n in rewritten.graph.node if n.domain] == ["DiagonalStateSpace"]
    attach_functions(rewritten)
    x = torch.randn(3, 21, WIDTH)
    expected = module.double()(x.double()).detach().numpy()
    (got,) = run(rewritten, x)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_is_zero_is_not_written() -> None:
    model = traced(Several(lambda z, w, x: torch.exp(1j * x) * (x + 0j)), 5 * WIDTH).graph
    found = sorted(
        node.op_type for node in model.graph.node if node.op_type in ("Mul", "Add", "Exp")
    )
    assert found == ["Mul", "Mul"]


@pytest.mark.parametrize(
    ("function", "dtype", "parts"),
    [
        (lambda x: x.sum(-1), torch.complex64, ("input x is complex", "torch.view_as_real(x)")),
        (lambda x: x * 1j, torch.float32, ("gives complex numbers", "y.real and y.imag")),
        (
            lambda x: torch.tanh(x * 1j).real,
            torch.float32,
            ("aten.tanh.default of complex numbers", "ac - bd", "test_complex_numbers.py:", "tanh"),
        ),
    ],
    ids=["input", "output", "operator"],
)
def test_what_has_no_pairs_is_refused(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, parts: tuple[str, ...]
) -> None:
    class Layer(nn.Module):
        def forward(self, x):
            return function(x)

    loaded = load_module((Layer(), (torch.randn(2, 6, WIDTH, dtype=dtype),)), "complex:layer")
    with pytest.raises(UnsupportedModelError) as raised:
        trace(loaded)
    assert all(part in str(raised.value) for part in parts), str(raised.value)
