"""Programs that are translated without a second trace give what torch's own way gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.system.torch_internals import exports
from linexport.trace import graph
from linexport.trace.decompositions.undecomposed import undecomposed
from linexport.trace.graph import to_onnx


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> object:
        return self.function(self.linear(x))


def joined(x: Tensor) -> Tensor:
    y = x.unflatten(2, (2, -1)).flatten(0, 1)
    return y.flatten(-2).view(x.shape[0], x.shape[1], -1).movedim(1, 0)


def parted(x: Tensor) -> tuple[Tensor, ...]:
    first, second, third = x.chunk(3, -1)
    return first.expand_as(second) * third, second.mT, 5 - third.square()


def cast(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.float(), x.half().float() + 1, x[:, 0:].to(torch.float64)


def sliced(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x[:, :, 2:].narrow(2, 1, 2)
    return y[:, 0:, :], (x[:, 0:] > 0) & (x < 1)


def normed(x: Tensor) -> Tensor:
    y = nn.functional.layer_norm(x, (6,))
    return y - torch.logsumexp(y, -1, keepdim=True) + nn.functional.softsign(y)


def masked(x: Tensor) -> Tensor:
    scores = x @ x.mT
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return scores.masked_fill(~causal, float("-inf")).softmax(-1) @ x


def checked(x: Tensor) -> Tensor:
    torch._check(x.shape[1] > 1)
    return torch.cat([x[:, :1], x], 1).cumsum(1)


def dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, training=False) + 1


def written_below_dropout(x: Tensor) -> Tensor:
    y = x + 1
    same = nn.functional.dropout(y, training=False)
    y.mul_(2)
    return same + y


def in_chunks(x: Tensor) -> Tensor:
    chunks = nn.functional.pad(x, (0, 0, 0, x.shape[1])).transpose(1, 2)
    return chunks.reshape(x.shape[0], 6, x.shape[1], 2).exp()


def overwritten(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    before = y.exp()
    y.mul_(2).div_(x.shape[1])
    y += before
    return y * before, torch.zeros_like(y, dtype=torch.int64).scatter_(2, y.topk(2).indices, 3)


def chosen(x: Tensor) -> Tensor:
    values, places = x.softmax(-1).topk(3)
    values /= values.sum(-1, keepdim=True)
    return values + places


def with_constants(x: Tensor) -> Tensor:
    return x @ torch.eye(6) * torch.linspace(0, 1, 6) + torch.arange(x.shape[1])[:, None]


ALONE = [
    joined,
    parted,
    cast,
    sliced,
    normed,
    masked,
    checked,
    dropped,
    written_below_dropout,
    in_chunks,
    overwritten,
    chosen,
    with_constants,
]


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    y[:, 0] = 2.0
    y.mul_(x)
    return y


def with_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    view = y.flatten(1)
    y.mul_(x)
    return y, view


def with_a_later_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    y.mul_(2)
    view = y[:, :1]
    y.mul_(x)
    return y, view.neg()


def into_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    y.mT.mul_(2)
    return y, x.view_as(x).add(1)


def in_a_lower_dtype(x: Tensor) -> Tensor:
    y = (x * 10).half()
    y.add_(torch.full((6,), 0.1, dtype=torch.float32))
    return y.float()


def decomposed_in_place(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (6,))


def branched(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


class Cell(nn.Module):
    """Its decomposition would fix the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, 0])[0]


def transformed(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=-1), n=6, dim=-1)


AGAIN = [
    in_place,
    with_a_view,
    with_a_later_view,
    into_a_view,
    in_a_lower_dtype,
    decomposed_in_place,
    branched,
    Cell().eval(),
    transformed,
]


def program(function: Callable[[Tensor], object]) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    module = Function(function).eval()
    dims = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return torch.export.export(module, (torch.randn(2, 5, 6),), dynamic_shapes=dims)


def run(program: torch.export.ExportedProgram, x: Tensor) -> list[np.ndarray]:
    model = to_onnx(program).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


def name(function: Callable[[Tensor], object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


@pytest.mark.parametrize("function", [*ALONE, *AGAIN], ids=name)
@pytest.mark.parametrize("sizes", [(2, 5), (1, 9), (3, 2)])
def test_it_gives_the_values_of_the_module(
    function: Callable[[Tensor], object], sizes: tuple[int, int]
) -> None:
    found = program(function)
    x = torch.randn(*sizes, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = found.module()(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ours, original in zip(run(found, x), expected, strict=True):
        assert ours.dtype == original.numpy().dtype
        np.testing.assert_allclose(ours, original.numpy(), rtol=1e-5, atol=1e-6)


def traced_twice(
    function: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """Whether each program of the function was handed back to torch."""
    found = list[bool]()

    def seen(*given: object) -> object:
        result = undecomposed(*given)  # type: ignore[arg-type]
        found.append(result is None)
        return result

    monkeypatch.setattr(graph, "undecomposed", seen)
    to_onnx(program(function))
    return found


@pytest.mark.parametrize("function", ALONE, ids=name)
def test_no_second_trace_is_made(
    function: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traced_twice(function, monkeypatch) == [False]


@pytest.mark.parametrize("function", ALONE, ids=name)
def test_the_program_is_not_changed(function: Callable[[Tensor], object]) -> None:
    made = program(function)
    before = str(made.graph), str(made.graph_signature)
    to_onnx(made)
    assert (str(made.graph), str(made.graph_signature)) == before


def test_nothing_of_dropout_is_left() -> None:
    assert "Dropout" not in {node.op_type for node in to_onnx(program(dropped)).graph.node}


def test_sizes_have_the_form_that_a_view_gives_them() -> None:
    """torch traces 2 as 2 T // T here."""
    values = {v.name: v for v in to_onnx(program(in_chunks)).graph.value_info}
    [shape] = [
        [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in values.values()
        if len(v.type.tensor_type.shape.dim) == 4
    ]
    assert shape[1::2] == [6, 2]


@pytest.mark.parametrize("function", AGAIN, ids=name)
def test_what_writes_branches_or_fixes_sizes_is_traced_again(
    function: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traced_twice(function, monkeypatch) == [True]


class OfPython(nn.Module):
    """A model whose values are called like functions of Python."""

    def forward(self, input: Tensor, len: Tensor) -> Tensor:
        return (input + 1).flatten(1) * len.square()


def test_inputs_keep_their_names() -> None:
    made = torch.export.export(OfPython(), (torch.ones(2, 3, 4), torch.ones(2, 1)))
    assert [i.name for i in to_onnx(made).graph.input] == ["input", "len"]


def test_a_torch_without_these_names_traces_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = exports.Internal("torch.no_module", "f", "is tested", exports.SLOWER)
    x = torch.randn(2, 5, 6)
    expected = run(program(joined), x)
    for name in ("SECOND_TRACE", "TRANSLATED"):
        with monkeypatch.context() as patch:
            patch.setattr(exports, name, gone)
            np.testing.assert_array_equal(run(program(joined), x)[0], expected[0])
