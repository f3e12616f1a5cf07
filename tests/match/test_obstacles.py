"""Reasons where nothing was fused: never none, and about what the model really computes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

from linexport import passes
from linexport.errors import BuildError
from linexport.sources.factory import load_module
from linexport.trace import trace
from linexport.trace.graph import to_graph

WIDTH = 8
TABLE = torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH)
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Three(nn.Module):
    """A function of three projections of the input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        return self.function(*(p(x) for p in self.projections))


def triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1]).tril()


def own_weight_of_a_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = v.shape[1]
    place = torch.arange(length)
    apart = (place[:, None] - place - 1)[..., None]
    earlier = torch.where(apart >= 0, torch.exp(-0.5 * apart.clamp(min=0)), 0.0)
    weights = earlier + 1.4 * (place[:, None] == place + 2).to(k.dtype)[..., None]
    return torch.einsum("tsd,bsd->btd", weights.expand(-1, -1, WIDTH), k * v)


def tree_scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decay, total = k.sigmoid(), v
    for step in (1, 2, 4, 8):
        earlier = [
            F.pad(x, (0, 0, step, 0), value=i)[:, :-step] for i, x in ((1.0, decay), (0, total))
        ]
        decay, total = decay * earlier[0], total + decay * earlier[1]
    return total


def rwkv4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(k.shape[1])
    distance = (place[:, None] - place - 1)[..., None]
    exponent = torch.where(distance >= 0, -0.5 * distance, float("-inf")) + k[:, None]
    largest = torch.maximum(exponent.amax(2), k)
    weights = torch.exp(exponent - largest[:, :, None])
    now = torch.exp(k - largest)
    return ((weights * v[:, None]).sum(2) + now * v) / (weights.sum(2) + now)


def epsilon_after_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.relu() @ k.relu().mT * triangle(q) + 1e-6
    return scores @ v / scores.sum(-1, keepdim=True)


def epsilon_in_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT + 0.001) * triangle(q)
    return scores @ v / scores.sum(-1, keepdim=True)


def gated_experts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bte,bted->btd", q.softmax(-1), k[..., None] * v[:, :, None])


def fourier(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.fft.fft(q, dim=1).abs()


def each_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * k + v


def stable_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(triangle(q) == 0, -1e9)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def softmax_by_its_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def fourier_convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    size = 2 * q.shape[1]
    product = torch.fft.rfft(q, n=size, dim=1) * torch.fft.rfft(k, n=size, dim=1)
    return torch.fft.irfft(product, n=size, dim=1)[:, : q.shape[1]]


def distances_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    return (q @ k.mT - (place[:, None] - place)) * triangle(q) @ v


def average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + v.mean(1, keepdim=True)


def weights_of_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pairs = (v[..., 0, None] - v[:, None, :, 0]).cos()
    scores = q.relu() @ k.relu().mT * pairs
    return scores @ v / (scores.sum(-1, keepdim=True) + 1)


def segments(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    number = (v[..., 0] > 0.5).cumsum(1)
    return ((q @ k.mT).tril() * (number[:, :, None] == number[:, None])) @ v


def projected_along_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table = TABLE[: k.shape[1]].mT
    return (q @ (table @ k).mT).softmax(-1) @ (table @ v)


def queries_of_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = TABLE[: k.shape[1]].relu() @ k.relu().mT
    return scores @ v / (scores.sum(-1, keepdim=True) + 1)


def steps_of_while_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = torch.tensor(v.shape[1])

    def step(t: Tensor, h: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        h = 0.9 * h + v.index_select(1, t.reshape(1))[:, 0]
        here = (torch.arange(out.shape[1]) == t)[:, None]
        return t + 1, h, torch.where(here, h[:, None] + out[:, :1], out)

    begun = (torch.tensor(0), torch.zeros_like(v[:, 0]), torch.zeros_like(v))
    return while_loop(lambda t, h, out: t < length, step, begun)[2]


CASES = {
    steps_of_while_loop: ("Loop", "not each in its turn", "x[:, i] while i < x.shape[1]"),
    stable_softmax: ("exp is taken of query times key: softmax attention",),
    softmax_by_its_logarithm: ("exp is taken of query times key: softmax attention",),
    fourier_convolution: ("DFT", "Fourier"),
    distances_added: ("positions are added to products of query and key",),
    average: ("adds up tokens", "alone, not of a product of query, key and value"),
    weights_of_pairs: ("cos, with a number for each query and key", "make a causal mask"),
    tree_scan: ("Pad", "tree scan"),
    segments: ("as segments between resets are", "torch.where(reset[:, t], 0, state)"),
    rwkv4: ("exponents", "of each query subtracted"),
    own_weight_of_a_distance: ("weighs pairs of tokens of its own", "of one distance"),
    epsilon_after_the_mask: ("MatMul", "1e-06 is added after the mask"),
    epsilon_in_the_scores: ("scores x become 0.001 + x", "may be negative"),
    gated_experts: ("no operation was found that adds up tokens",),
    fourier: ("DFT", "Fourier"),
    each_token: ("no operation was found that adds up tokens",),
}


def traced(function: Function) -> torch.export.ExportedProgram:
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    example = (torch.randn(2, 20, WIDTH),)
    return torch.export.export(Three(function), example, dynamic_shapes=dynamic, strict=False)


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_what_is_not_fused_has_one_reason_that_is_true(function: Function) -> None:
    found = to_graph(traced(function))
    findings = passes.rewrite(found.graph, weights=found.weights).findings
    assert not findings.matches and not findings.rejected
    (reason,) = {candidate.reason for candidate in findings.unmatched}
    assert all(part in reason for part in CASES[function]), reason


@pytest.mark.parametrize(
    ("function", "sides", "projected"),
    [(projected_along_tokens, {"key", "value"}, True), (queries_of_places, {"query"}, False)],
)
def test_what_all_sequences_share_is_named(
    function: Function, sides: set[str], projected: bool
) -> None:
    found = to_graph(traced(function))
    findings = passes.rewrite(found.graph, weights=found.weights).findings
    assert not findings.matches and not findings.rejected
    reasons = {candidate.reason for candidate in findings.unmatched}
    assert {reason.split()[1] for reason in reasons} == sides
    assert all("is the same along s" in reason for reason in reasons), reasons
    said = {f"to a fixed number of them ({WIDTH}), as Linformer" in reason for reason in reasons}
    assert said == {projected}


def test_a_fixed_length_is_the_reason_where_there_is_one() -> None:
    program = torch.export.export(Three(fourier), (torch.randn(2, 6, WIDTH),), strict=False)
    (candidate,) = passes.rewrite(to_graph(program).graph).findings.unmatched
    assert "no dimension besides the batch is dynamic" in candidate.reason


def test_the_source_line_is_kept_without_the_folder_it_is_in() -> None:
    class Direct(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """(B, T, WIDTH)."""
            return (x @ x.mT).softmax(-1) @ x

    found = trace(load_module((Direct(), (torch.randn(2, 12, WIDTH),)), "direct:layer"))
    line = found.line("output")
    assert line is not None and line.startswith("test_obstacles.py:")
    assert line.endswith(": return (x @ x.mT).softmax(-1) @ x")


def test_the_source_line_is_that_of_a_function_that_forward_calls() -> None:
    loaded = load_module((Three(stable_softmax), (torch.randn(2, 12, WIDTH),)), "three:layer")
    line = trace(loaded).line("output")
    assert line is not None and line.startswith("test_obstacles.py:")
    assert line.endswith(": return weights / weights.sum(-1, keepdim=True) @ v")


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (
            lambda q, k, v: q if q.sum() > 0 else v,
            ("data-dependent", "torch.where", "test_obstacles"),
        ),
        (lambda q, k, v: q.kthvalue(2, 1)[0], ("kthvalue", "no operator for it", "with others")),
        (lambda q, k, v: torch.from_numpy(q.numpy().cumsum(1)), ("numpy", "the function of torch")),
    ],
    ids=["branch", "operator", "numpy"],
)
def test_messages_of_torch_are_whole_and_say_what_helps(
    function: Function, parts: tuple[str, ...]
) -> None:
    loaded = load_module((Three(function).eval(), (torch.randn(2, 12, WIDTH),)), "three:layer")
    with pytest.raises(BuildError) as raised:
        trace(loaded)
    assert all(part in str(raised.value) for part in parts)
    assert re.search(r"\nAt .*test_obstacles\.py:\d+: .*lambda q, k, v: ", str(raised.value))
    assert "TORCH_LOGS" not in str(raised.value) and "Caused by" not in str(raised.value)


def test_a_model_that_runs_and_is_not_traced_is_not_told_to_fail() -> None:
    layer = Three(lambda q, k, v: q.kthvalue(2, 1)[0]).eval()
    with pytest.raises(BuildError) as raised:
        trace(load_module((layer, (torch.randn(2, 12, WIDTH),)), "three:layer"))
    assert "fails on its example" not in str(raised.value)


def test_an_error_that_eager_mode_has_as_well_is_said_once() -> None:
    """As of a tensor that a body of ``while_loop`` indexes by the number of the step."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            """(B, T, WIDTH)."""

            def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, x + x @ self.weights[i]

            return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1]

    loaded = load_module((Indexed().eval(), (torch.randn(2, 12, WIDTH),)), "indexed:layer")
    with pytest.raises(BuildError, match="in eager mode by the same error") as raised:
        trace(loaded)
    assert str(raised.value).count("Could not extract") == 1


STEPS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "turns of each half by another angle": (
        lambda h, k, v: k.cos() * h + k.sin() * torch.cat((-h[:, 4:], h[:, :4]), -1) + v,
        "linear recurrence, but of no form",
    ),
    "of a state": (lambda h, k, v: (k * h + v).tanh(), "Tanh is computed of it"),
    "a maximum": (lambda h, k, v: torch.maximum(h + k, v), "Max is computed of it"),
    "a square": (lambda h, k, v: k * h * h + v, "Mul is computed of it"),
    "a quotient": (lambda h, k, v: v / (h + 2), "Div is computed of it"),
}


@pytest.mark.parametrize("name", STEPS)
def test_of_a_loop_it_is_said_whether_it_is_linear(name: str) -> None:
    step, expected = STEPS[name]

    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, out = torch.zeros_like(v[:, 0]), []
        for t in range(v.shape[1]):
            state = step(state, k[:, t], v[:, t])
            out.append((q[:, t] * state).exp())  # what is computed of a state is not kept
        return torch.stack(out, 1)

    found = trace(load_module((Three(loop), (torch.randn(2, 12, WIDTH),)), "three:layer"))
    findings = passes.rewrite(found.graph, weights=found.weights).findings
    assert not findings.matches
    (reason,) = {candidate.reason for candidate in findings.unmatched}
    assert expected in reason


def coupled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g = h = torch.zeros_like(v[:, 0])
    out = []
    for t in range(v.shape[1]):
        g = q[:, t].sigmoid() * g + h * v[:, t]
        h = k[:, t].sigmoid() * h + g * v[:, t]
        out.append(h)
    return torch.stack(out, 1)


def of_two_matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    g = h = torch.zeros(*v[:, 0].shape, v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        g = 0.9 * g + k[:, t, :, None] * v[:, t, None]
        h = 0.7 * h + g
        out.append((q[:, t, None] @ h)[:, 0])
    return torch.stack(out, 1)


def longhorn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Longhorn (arXiv:2407.14207) token by token."""
    state, out = torch.zeros(*v[:, 0].shape, v.shape[-1]), []
    for t in range(v.shape[1]):
        kept = 1 - v[:, t, :, None].sigmoid() * k[:, t, None].square()
        state = kept * state + v[:, t, :, None] * k[:, t, None]
        out.append((state @ q[:, t, :, None])[..., 0])
    return torch.stack(out, 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (coupled, "two of them read each other"),
        (longhorn, "a sum of products, such as 1 - x y"),
        (of_two_matrices, "one of them reads another that has more numbers"),
    ],
    ids=["coupled", "longhorn", "cascade"],
)
def test_what_keeps_a_linear_loop_from_being_fused_is_named(
    function: Function, expected: str
) -> None:
    found = trace(load_module((Three(function), (torch.randn(2, 12, WIDTH),)), "three:layer"))
    (candidate,) = passes.rewrite(found.graph, weights=found.weights).findings.unmatched
    assert "is linear in its states" in candidate.reason and expected in candidate.reason


def test_of_a_loop_over_chunks_the_loop_is_named() -> None:
    """Not the reshape that makes its chunks."""

    def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (z.unflatten(1, (-1, 4)) for z in (q, k, v))
        state, out = v[:, 0] * 0, []
        for i in range(v.shape[1]):
            state = (state + k[:, i]).tanh()
            out.append(q[:, i] * state)
        return torch.stack(out, 1).flatten(1, 2)

    found = trace(load_module((Three(chunks), (torch.randn(2, 16, WIDTH),)), "three:layer"))
    (candidate,) = passes.rewrite(found.graph, weights=found.weights).findings.unmatched
    assert candidate.reason.startswith("Scan") and "Tanh is computed of it" in candidate.reason


def test_a_loop_behind_a_convolution_has_its_reason() -> None:
    """As in Longhorn, where the convolution alone is fused, and nothing was said of the loop."""

    class Convolved(Three):
        def __init__(self, function: Function) -> None:
            super().__init__(function)
            self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            """(B, T, WIDTH)."""
            return super().forward(self.convolution(x.mT)[..., : x.shape[1]].mT)

    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second, out = v[:, 0] * 0, (v * k)[:, 0] * 0, []
        for t in range(v.shape[1]):
            first = (1 - k[:, t] ** 2) * first + second * v[:, t]
            second = k[:, t] * second + first
            out.append((q[:, t] * second).sum(-1))
        return torch.stack(out, 1)

    found = trace(load_module((Convolved(loop), (torch.randn(2, 12, WIDTH),)), "conv:layer"))
    rewritten = passes.rewrite(found.graph, weights=found.weights)
    assert "CausalConvWithState" in {n.op_type for n in rewritten.model.graph.node}
    (candidate,) = rewritten.findings.unmatched
    assert candidate.reason.startswith("Scan") and "read each other" in candidate.reason


def test_tracebacks_of_torch_are_not_printed_beside_the_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a model that takes one row: the example of one is repeated to two."""
    one = Three(lambda q, k, v: q.reshape(12, WIDTH) @ k.reshape(12, WIDTH).mT)
    loaded = load_module((one, (torch.randn(1, 12, WIDTH),)), "a:b")
    with pytest.raises(
        BuildError, match=r"(?s)invalid for input.*itself fails on x \(2, 12, 8\)"
    ) as e:
        trace(loaded)
    assert "The example batch of 1 was repeated to 2" in str(e.value)
    assert not [r for r in caplog.records if r.name == "torch._subclasses.fake_tensor"]
