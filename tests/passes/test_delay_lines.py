"""What looks back along the tokens by a constant gets a state, however that is written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from linexport import passes
from linexport.graph.states import find_states
from linexport.plugins.ops.registry import register_schemas
from tests.support.pieces import in_pieces, largest_error, random_pieces, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
LIMIT = 2e-6

Delay = Callable[[Tensor, int], Tensor]


class Linear(nn.Module):
    """Causal linear attention, which tells the token axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q.sigmoid() @ k.sigmoid().mT).tril()
        return (scores @ v) / scores.sum(-1, keepdim=True)


def padded_and_cut(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, 0))[:, : x.shape[1]]


def padded_by_less(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, -k))


def cut_and_padded(x: Tensor, k: int) -> Tensor:
    return F.pad(x[:, :-k], (0, 0, k, 0))


def cut_and_joined(x: Tensor, k: int) -> Tensor:
    return torch.cat([x.new_zeros(x.shape[0], k, x.shape[2]), x[:, :-k]], 1)


def joined_and_cut(x: Tensor, k: int) -> Tensor:
    return torch.cat([torch.zeros(x.shape[0], k, x.shape[2]), x], 1)[:, : x.shape[1]]


def joined_and_cut_from_the_end(x: Tensor, k: int) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]).expand(-1, k, -1), x], 1)[:, :-k]


def gathered_and_masked(x: Tensor, k: int) -> Tensor:
    places = torch.arange(x.shape[1]) - k
    return x[:, places.clamp(min=0)] * (places >= 0)[:, None]


def selected_and_chosen(x: Tensor, k: int) -> Tensor:
    places = torch.arange(x.shape[1]) - k
    return torch.where((places >= 0)[None, :, None], x.index_select(1, places.clamp(min=0)), 0.0)


def taken_along(x: Tensor, k: int) -> Tensor:
    places = torch.arange(x.shape[1]) - k
    taken = torch.gather(x, 1, places.clamp(min=0)[None, :, None].expand_as(x))
    return taken.masked_fill((places < 0)[None, :, None], 0.0)


def rolled_and_masked(x: Tensor, k: int) -> Tensor:
    return torch.roll(x, k, 1) * (torch.arange(x.shape[1]) >= k)[None, :, None]


def rolled_and_cleared(x: Tensor, k: int) -> Tensor:
    rolled = torch.roll(x, k, 1).clone()
    rolled[:, :k] = 0
    return rolled


def rolled_and_joined(x: Tensor, k: int) -> Tensor:
    rolled = torch.roll(x, k, 1)
    return torch.cat([torch.zeros_like(rolled[:, :k]), rolled[:, k:]], 1)


def written_into_zeros(x: Tensor, k: int) -> Tensor:
    result = torch.zeros_like(x)
    result[:, k:] = x[:, :-k]
    return result


def unfolded(x: Tensor, k: int) -> Tensor:
    return F.pad(x, (0, 0, k, 0)).unfold(1, k + 1, 1)[..., 0]


def convolved(x: Tensor, k: int) -> Tensor:
    taps = torch.cat([torch.ones(WIDTH, 1, 1), torch.zeros(WIDTH, 1, k)], 2).to(x.dtype)
    return F.conv1d(F.pad(x.mT, (k, 0)), taps, groups=x.shape[2]).mT


def multiplied(x: Tensor, k: int) -> Tensor:
    places = torch.arange(x.shape[1])
    return (places[:, None] - places == k).to(x.dtype) @ x


NOTATIONS: list[Delay] = [
    *(padded_and_cut, padded_by_less, cut_and_padded, cut_and_joined, joined_and_cut),
    *(joined_and_cut_from_the_end, gathered_and_masked, selected_and_chosen, taken_along),
    *(rolled_and_masked, rolled_and_cleared, rolled_and_joined, written_into_zeros),
    *(unfolded, convolved, multiplied),
]


class Delays(nn.Module):
    """A weighed sum of delays, each in another notation and by another number, then attention."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.attend, self.first = Linear(), first

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for i, delay in enumerate(NOTATIONS):
            total = total + delay(x, self.first + 3 * i) / (i + 2)
        return self.attend(total)


def delayed_sum(x: Tensor, first: int) -> Tensor:
    """The sum in float64, from the definition."""
    total = x.clone()
    for i in range(len(NOTATIONS)):
        k = first + 3 * i
        total[:, k:] += x[:, : x.shape[1] - k] / (i + 2)
    return total


@pytest.mark.parametrize("first", [2, 150])
def test_every_notation_of_a_delay_is_one_line(first: int) -> None:
    module = Delays(first)
    farthest = first + 3 * (len(NOTATIONS) - 1)
    model = rewritten(module, torch.randn(2, farthest + 20, WIDTH))
    rows = [s.shape for s in find_states(model) if s.past.startswith("past_inputs")]
    assert rows == [("batch", farthest, WIDTH)]  # the convolution is an op, with a state of its own
    assert not {"Pad", "Gather", "GatherND", "ScatterND", "Range"} & {
        node.op_type for node in model.graph.node
    }
    x = torch.randn(2, 3 * farthest + 50, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = module.attend.double()(delayed_sum(x, first)).numpy()
    for pieces in (random_pieces(x.shape[1], 2 * farthest, first), [1] * (farthest + 5)):
        found = in_pieces(model, x.float().numpy(), pieces)
        assert largest_error(found, expected) < LIMIT


LAYOUTS = {
    "BTC": (("batch", "seq", 3), 1, 0),
    "BCT": (("batch", 3, "seq"), 2, 0),
    "BHTd": (("batch", 2, "seq", 3), 2, 0),
    "TBC": (("seq", "batch", 3), 0, 1),
    "BT": (("batch", "seq"), 1, 0),
}
KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}


def delayed_graph(layout: str, kind: str, k: int, fill: int) -> onnx.ModelProto:
    """``y = x - delayed(x)``, beside an attention that tells the token axis."""
    register_schemas()
    shape, axis, _ = LAYOUTS[layout]
    pads = np.zeros((2, len(shape)), np.int64)
    pads[:, axis] = k, -k
    dtype = helper.tensor_dtype_to_np_dtype(KINDS[kind])
    nodes = [
        helper.make_node("Pad", ["x", "pads", "fill"], ["late"], "pad"),
        helper.make_node("Sub", ["x", "late"], ["y"], "sub"),
        helper.make_node(
            *("LinearAttention", ["q", "q", "q"], ["z"], "attention"),
            domain="linexport",
            **{"q_num_heads": 1, "kv_num_heads": 1},
        ),
    ]
    info = helper.make_tensor_value_info
    width = ("batch", "seq", 4)
    graph = helper.make_graph(
        nodes,
        "delayed",
        [info("x", KINDS[kind], shape), info("q", TensorProto.FLOAT, width)],
        [info("y", KINDS[kind], shape), info("z", TensorProto.FLOAT, width)],
        [
            numpy_helper.from_array(pads.ravel(), "pads"),
            numpy_helper.from_array(np.asarray(fill, dtype), "fill"),
        ],
        value_info=[info("late", KINDS[kind], shape)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    return passes.run(helper.make_model(graph, opset_imports=opsets, ir_version=10))


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    kind=st.sampled_from(sorted(KINDS)),
    k=st.one_of(st.integers(1, 40), st.integers(41, 3000)),
    fill=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 99),
)
def test_a_delay_of_any_layout_type_and_number_streams(
    layout: str, kind: str, k: int, fill: int, seed: int
) -> None:
    shape, axis, batch = LAYOUTS[layout]
    model = delayed_graph(layout, kind, k, fill)
    del model.graph.output[1]  # the attention has told what is along the tokens
    kept = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    model.graph.node.remove(kept)
    for side in (model.graph.input, model.graph.output):
        for value in [v for v in side if v.name == "q" or "state" in v.name]:
            side.remove(value)
    (rows,) = [s for s in find_states(model) if not s.past.endswith("begun")] or [None]
    sizes = {"batch": 2, "seq": 2 * k + 30}
    random = np.random.default_rng(seed)
    x = random.integers(-50, 50, [sizes.get(s, s) for s in shape])
    late = np.full_like(x, fill)
    into, of = ([slice(None)] * x.ndim for _ in range(2))
    into[axis], of[axis] = slice(k, None), slice(None, sizes["seq"] - k)
    late[tuple(into)] = x[tuple(of)]
    x = x.astype(helper.tensor_dtype_to_np_dtype(KINDS[kind]))
    found = in_pieces(model, x, random_pieces(sizes["seq"], k + 5, seed), axis, batch)
    np.testing.assert_array_equal(found, x - late)
    if rows is not None:
        assert rows.shape[0] == "batch" and k in rows.shape


class Windows(nn.Module):
    """A sum of what sees a window of tokens, each of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Linear()
        self.gaps = nn.Conv1d(WIDTH, WIDTH, 3, dilation=4)
        self.both = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2, padding=4, groups=2)
        self.image = nn.Conv2d(1, 1, 3, padding=(2, 1))

    def windows(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        cells = F.pad(x, (0, 0, 5, 0)).unfold(1, 6, 1)
        weights = (cells * x[..., None]).sum(2, keepdim=True).softmax(-1)
        stacked = F.pad(x, (0, 0, 6, 0))
        sums, lead = x.cumsum(1), F.pad(x, (0, 0, 1, 0)).cumsum(1)
        counts = torch.arange(1, length + 1).clamp(max=9)[:, None]
        return sum(
            [
                self.gaps(F.pad(x.mT, (8, 0))).mT,
                self.both(x.mT)[..., :length].mT,
                self.image(x[:, None])[:, 0, :length],
                F.avg_pool1d(F.pad(x.mT, (4, 0)), 5, 1).mT,
                cells.var(-1),
                cells.amax(-1),
                (cells * weights).sum(-1),
                sum(stacked[:, j : j + length] for j in (0, 2, 5)),
                (sums - F.pad(sums, (0, 0, 9, 0))[:, :length]) / counts,
                (lead[:, 1:] - F.pad(lead, (0, 0, 20, 0))[:, 1 : length + 1]) / 20,
                torch.diff(x, dim=1, prepend=x[:, :1]),
                x[:, (torch.arange(length) - 12).clamp(min=0)],
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.windows(x) / 8)


@pytest.fixture(scope="module")
def windows() -> tuple[Windows, onnx.ModelProto]:
    module = Windows()
    return module, rewritten(module, torch.randn(2, 40, WIDTH))


def test_windows_read_the_lines_of_their_values(windows: tuple[Windows, onnx.ModelProto]) -> None:
    module, model = windows
    states = [s.past for s in find_states(model)]
    assert len([name for name in states if name.startswith("past_inputs")]) <= 7
    x = torch.randn(3, 500, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = module.double()(x).numpy()
    module.float()
    for pieces in (random_pieces(500, 60, 1), [1] * 45, [500]):
        assert largest_error(in_pieces(model, x.float().numpy(), pieces), expected) < 4 * LIMIT


class LooksAhead(nn.Module):
    """Convolutions and sums that see later tokens, too."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Linear()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 3, 0))
        total = padded.sum(1, keepdim=True)
        return self.attend(self.conv(x.mT).mT + (padded - total)[:, 3:])


def test_what_sees_later_tokens_gets_no_state_and_is_as_it_was() -> None:
    module = LooksAhead()
    model = rewritten(module, torch.randn(2, 40, WIDTH))
    assert not [s for s in find_states(model) if s.past.startswith("past_inputs")]
    (conv,) = [n for n in model.graph.node if n.op_type == "Conv"]
    assert next(list(a.ints) for a in conv.attribute if a.name == "pads") == [2, 2]


class Lags(nn.Module):
    """Differences to a day and to a week before, of the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x - padded_and_cut(x, 24) + padded_and_cut(x, 168) / 2)


def test_delays_of_one_value_share_the_rows_of_the_longest() -> None:
    model = rewritten(Lags(), torch.randn(2, 40, WIDTH))
    rows = [s.shape for s in find_states(model) if s.past.startswith("past_inputs")]
    assert rows == [("batch", 168, WIDTH)]


class MaskedWindows(nn.Module):
    """A convolution by hand, as RecurrentGemma has it: a window of no delay is moved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.taps = Linear(), nn.Parameter(torch.rand(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length, total = x.shape[1], torch.zeros(())
        for shift in range(4):
            window = x[:, : length - shift] * torch.ones(x.shape[0], length - shift, 1)
            front = torch.zeros(x.shape[0], length - window.shape[1], WIDTH, dtype=x.dtype)
            total = total + torch.cat([front, window], 1) * self.taps[shift]
        return self.attend(total)


def test_a_moved_value_of_another_one_is_a_line_too() -> None:
    module = MaskedWindows()
    model = rewritten(module, torch.randn(2, 40, WIDTH))
    onnx.checker.check_model(model)
    x = torch.randn(2, 60, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = module.double()(x).numpy()
    found = in_pieces(model, x.float().numpy(), [1, 3, 1, 20])
    assert largest_error(found, expected) < LIMIT


class OneSequence(nn.Module):
    """Tokens without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Linear()

    def forward(self, x: Tensor) -> Tensor:
        late = F.pad(x, (0, 0, 9, 0), value=0.5)[: x.shape[0]]
        return self.attend((x - late)[None])[0]


def test_tokens_without_a_batch_have_states_of_one_row() -> None:
    module = OneSequence()
    model = rewritten(module, torch.randn(40, WIDTH), axis=0)
    assert ("past_inputs_0", (1, 9, WIDTH)) in [(s.past, s.shape) for s in find_states(model)]
    x = torch.randn(60, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = module.double()(x).numpy()
    found = in_pieces(model, x.float().numpy(), [1, 3, 1, 20], axis=0)
    assert largest_error(found, expected) < LIMIT
