"""MixtureOfExperts: its oracle, refusals, ONNX bodies, PyTorch twin; experts of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linexport.errors import OpError, UnsupportedModelError
from linexport.models.functional import mixture_of_experts as in_pytorch
from linexport.patches import experts as patch
from linexport.plugins.ops.mixture_of_experts import (
    ACTIVATIONS,
    INPUTS,
    OP,
    SLACK,
    ExpertFunction,
    check,
    every_expert,
    mixture_of_experts,
)
from linexport.plugins.ops.op import Lowering, Node
from linexport.plugins.ops.registry import attach_functions

E, K, H, INNER, OUT = 12, 2, 8, 5, 7
Arrays = dict[str, np.ndarray]


def inputs(
    tokens: int, gated: bool = True, index: np.ndarray | None = None, seed: int = 0
) -> Arrays:
    """Random ones; a token has no expert twice."""
    rng = np.random.default_rng(seed)
    if index is None:
        index = rng.random((tokens, E)).argsort(1)[:, :K]
    x = {
        "x": rng.normal(size=(tokens, H)),
        "weight": rng.normal(size=(tokens, K)),
        "up": rng.normal(size=(E, INNER * (1 + gated), H)) / H**0.5,
        "down": rng.normal(size=(E, OUT, INNER)) / INNER**0.5,
    }
    return {n: v.astype(np.float32) for n, v in x.items()} | {"index": index.astype(np.int64)}


def oracle(x: Arrays, function: ExpertFunction) -> np.ndarray:
    wide = {n: v if n == "index" else v.astype(np.float64) for n, v in x.items()}
    return mixture_of_experts(function, **wide)


def model(function: ExpertFunction, write: Lowering, element: int = TensorProto.FLOAT) -> Any:
    node = helper.make_node(
        "MixtureOfExperts",
        list(INPUTS),
        ["y"],
        domain="linexport",
        **{**asdict(function), "gated": int(function.gated)},
    )
    shapes: dict[str, list[Any]] = {
        "x": ["N", H],
        "index": ["N", K],
        "weight": ["N", K],
        "up": [E, INNER * (1 + function.gated), H],
        "down": [E, OUT, INNER],
    }
    types = {n: TensorProto.INT64 if n == "index" else element for n in INPUTS}
    graph = helper.make_graph(
        [node],
        "alone",
        [helper.make_tensor_value_info(n, types[n], shapes[n]) for n in INPUTS],
        [helper.make_tensor_value_info("y", element, ["N", OUT])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    attach_functions(made, lambda *_: write)
    onnx.checker.check_model(made, full_check=True)
    return made


def opened(made: onnx.ModelProto) -> Callable[[Arrays], np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(made.SerializeToString(), options)
    return lambda x: np.asarray(session.run(None, x)[0])


def assert_close(got: np.ndarray, x: Arrays, function: ExpertFunction, rtol: float) -> None:
    want = oracle(x, function)
    assert np.abs(got - want).max(initial=0) <= rtol * max(1.0, np.abs(want).max(initial=0))


FUNCTIONS = [
    ExpertFunction(*kind)
    for activation in ACTIVATIONS
    for kind in ((activation, True), (activation, False), (activation, True, 0.5, 0.25))
] + [ExpertFunction("silu", False, 2.0), ExpertFunction("silu", True, 0.0, 1.5)]
SILU = ExpertFunction()
LOWERINGS = {"portable": OP.portable, "every_expert": every_expert}


def test_oracle_is_the_formula() -> None:
    """One token, two experts of width one, by hand."""
    up, down = np.array([[[2.0], [3.0]], [[-1.0], [5.0]]]), np.array([[[4.0]], [[7.0]]])
    y = mixture_of_experts(
        SILU, np.array([[0.5]]), np.array([[1, 0]]), np.array([[0.25, 2.0]]), up, down
    )
    silu = [1 / (1 + math.exp(-1)), -0.5 / (1 + math.exp(0.5))]
    expected = 2.0 * 4 * silu[0] * 1.5 + 0.25 * 7 * silu[1] * 2.5
    np.testing.assert_allclose(y, [[expected]], rtol=1e-14)


def test_oracle_caps_the_linear_part_of_the_gate_and_the_value() -> None:
    """One token, one expert of width one, by hand: the sigmoid sees the gate itself."""
    up, down = np.array([[[2.0], [3.0]]]), np.array([[[4.0]]])
    capped = ExpertFunction("silu", True, 0.5, 0.25)
    one = np.array([[1.0]])
    y = mixture_of_experts(capped, one, np.array([[0]]), one, up, down)
    gate = 0.5 * math.tanh(2 / 0.5) / (1 + math.exp(-2))
    np.testing.assert_allclose(y, [[4 * gate * 0.25 * math.tanh(3 / 0.25)]], rtol=1e-14)


@pytest.mark.smoke
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_body_equals_oracle(lowering: str, function: ExpertFunction) -> None:
    run = opened(model(function, LOWERINGS[lowering]))
    for tokens in (1, 2, 7, 65, 195):
        x = inputs(tokens, function.gated, seed=tokens)
        assert_close(run(x), x, function, 1e-6)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param([[4, 2]] * 65, id="all tokens, two experts"),
        pytest.param([[3, 3]] * 40, id="one expert, twice"),
        pytest.param([[0, 11]] * 60 + [[1, 2], [3, 4]], id="two of them, and others once"),
        pytest.param(np.zeros((0, K)), id="no token"),
    ],
)
def test_body_with_a_router_that_prefers(index: Any) -> None:
    """Passes over the experts: as many as the largest share needs."""
    index = np.asarray(index)
    x = inputs(len(index), True, index)
    if len(index):
        assert np.bincount(index.ravel(), minlength=E).max() > SLACK * index.size // E + 1
    assert_close(opened(model(SILU, OP.portable))(x), x, SILU, 1e-6)


def test_bodies_in_onnx_s_evaluator() -> None:
    x = inputs(9)
    for write in LOWERINGS.values():
        [got] = ReferenceEvaluator(model(SILU, write)).run(None, x)
        assert_close(got, x, SILU, 1e-6)


def test_half_precision_computes_in_float32() -> None:
    run = opened(model(SILU, OP.portable, TensorProto.FLOAT16))
    x = inputs(33)
    narrow = {n: v if n == "index" else v.astype(np.float16) for n, v in x.items()}
    want = oracle(narrow, SILU)
    np.testing.assert_allclose(run(narrow), want, rtol=2**-11, atol=1e-5)


def test_every_lowering_is_linear_in_what_experts_count() -> None:
    """A weight of zero leaves an expert out, and doubling weights doubles the output."""
    x = inputs(20)
    for write in LOWERINGS.values():
        run = opened(model(SILU, write))
        nothing = {**x, "weight": np.zeros_like(x["weight"])}
        assert not run(nothing).any()
        np.testing.assert_array_equal(run({**x, "weight": 2 * x["weight"]}), 2 * run(x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": ExpertFunction("tanh")}, "activation is 'tanh'; expected one of silu"),
        ({"function": ExpertFunction(gate_cap=-1.0)}, "gate_cap is -1.0; expected a positive"),
        ({"function": ExpertFunction(value_cap=math.nan)}, "value_cap is nan; expected a positive"),
        ({"function": ExpertFunction("relu2", False, 0.0, 3.0)}, "value_cap is 3.0, and experts w"),
        ({"weight": (3, 1)}, "weight has experts a token 1; expected 2"),
        ({"index": (4, 2)}, "index has tokens 4; expected 3"),
        ({"up": (5, 10, 8)}, "up has experts 5; expected 6"),
        ({"up": (6, 5, 8)}, "up has rows 5; expected 10"),
        ({"up": (6, 10, 9)}, "up has columns 9; expected 8"),
        ({"x": (2, 3, 8)}, "x has shape"),
        ({"down": ("E", 7, 5)}, "must be fixed"),
    ],
)
def test_wrong_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    right = {"x": (3, 8), "index": (3, 2), "weight": (3, 2), "up": (6, 10, 8), "down": (6, 7, 5)}
    check(SILU, **right)
    with pytest.raises(OpError, match=message):
        check(**{"function": SILU, **right, **changes})


def test_a_node_without_an_input_is_refused() -> None:
    with pytest.raises(OpError, match="lacks the input down"):
        OP.shapes(Node("MixtureOfExperts", {}, INPUTS, dict.fromkeys(INPUTS[:-1], (1, 1))))


# The PyTorch twin --------------------------------------------------------------------------------


def tensors(x: Arrays) -> dict[str, torch.Tensor]:
    found = {n: torch.from_numpy(v.copy()) for n, v in x.items()}
    return {n: v if n == "index" else v.double() for n, v in found.items()}


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_twin_equals_oracle(function: ExpertFunction) -> None:
    for tokens in (0, 1, 7, 65):
        x = inputs(tokens, function.gated, seed=tokens)
        got = in_pytorch(**tensors(x), **asdict(function))
        np.testing.assert_allclose(got.numpy(), oracle(x, function), rtol=1e-11, atol=1e-13)


def test_twin_has_gradients() -> None:
    x = tensors(inputs(3))
    index = x.pop("index")

    def run(*values: torch.Tensor) -> torch.Tensor:
        return in_pytorch(**dict(zip(x, values, strict=True)), index=index)

    assert torch.autograd.gradcheck(run, [v.requires_grad_() for v in x.values()])


def test_operator() -> None:
    x = tensors(inputs(5))
    call = torch.ops.linexport.mixture_of_experts.default
    arguments, keywords = tuple(x[n] for n in INPUTS), {"activation": "silu", "gated": 1}
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(call, arguments, keywords, test_utils=checks)
    torch.testing.assert_close(call(*arguments, **keywords), in_pytorch(**x), rtol=0, atol=0)


# Experts of transformers -------------------------------------------------------------------------


def library_experts(kind: str) -> Any:
    """A layer's experts as the library builds them, which computes with its own loop."""
    from transformers.models.inkling2 import modeling_inkling2 as capped
    from transformers.models.nemotron_h import modeling_nemotron_h as plain
    from transformers.models.qwen3_next import modeling_qwen3_next as gated

    torch.manual_seed(0)
    if kind == "capped":
        config = capped.Inkling2TextConfig(
            hidden_size=H, moe_intermediate_size=INNER, mlp_gate_softcap=0.5, mlp_up_softcap=0.25
        )
        config.n_routed_experts = E
        made = capped.Inkling2Experts(config)
    elif kind == "gated":
        config = gated.Qwen3NextConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E)
        made = gated.Qwen3NextExperts(config)
    else:
        config = plain.NemotronHConfig(hidden_size=H, moe_intermediate_size=INNER)
        config.n_routed_experts = E
        made = plain.NemotronHExperts(config)
    config._experts_implementation_internal = "eager"
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.requires_grad_(False)


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = inputs(tokens, seed=tokens)
    return tuple(torch.from_numpy(x[n]) for n in ("x", "index", "weight"))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["gated", "plain", "capped"])
def test_the_op_is_the_library_s_loop(kind: str) -> None:
    module = library_experts(kind)
    assert patch.described(module)
    for tokens in (1, 7, 65, 195):
        given = routed(tokens)
        torch.testing.assert_close(patch.forward(module, *given), module(*given))


def other_experts(kind: str) -> Any:
    """A layer's experts that the op does not describe."""
    from transformers.models.gpt_oss import modeling_gpt_oss as transposed
    from transformers.models.muse_spark import modeling_muse_spark as normed

    if kind == "interleaved gate":
        module = copy.copy(library_experts("gated"))

        class Interleaved(type(module)):  # type: ignore[misc]
            def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
                gated: torch.Tensor = self.act_fn(h[..., ::2]) * h[..., 1::2]
                return gated

        module.__class__ = Interleaved
        return module
    if kind == "other activation":
        module = library_experts("plain")
        module.act_fn = torch.nn.Softsign()
        return module
    if kind == "biases, transposed":
        config = transposed.GptOssConfig(hidden_size=H, intermediate_size=INNER)
        config.num_local_experts = E
        made = transposed.GptOssExperts(config)
    else:
        sizes = {"moe_hidden_size": H, "moe_intermediate_size": INNER, "num_local_experts": E}
        config = normed.MuseSparkTextConfig(**sizes)
        made = normed.MuseSparkExperts(config)
    config._experts_implementation_internal = "eager"
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.requires_grad_(False)


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest output of an operator."""

    elements = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        found = call(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes)
        return found


@pytest.mark.parametrize(
    "kind", ["interleaved gate", "other activation", "biases, transposed", "norm of each expert"]
)
def test_experts_that_the_op_does_not_describe(kind: str) -> None:
    """Equal to the library's other form, without its weights for every token."""
    from transformers.integrations.moe import batched_mm_experts_forward

    module = other_experts(kind)
    assert patch.described(module) is None
    assert patch.forward(module, *routed(0)).shape == (0, H)
    for tokens in (1, 7, 65):
        given = routed(tokens)
        with LargestTensor() as largest:
            got = patch.forward(module, *given)
        torch.testing.assert_close(got, batched_mm_experts_forward(module, *given))
        assert largest.elements <= E * 2 * INNER * max(H, tokens)


def test_a_cap_of_zero_is_left_to_the_library() -> None:
    """Its quotients are no numbers, and the op would not cap."""
    module = library_experts("capped")
    module.act_fn.up_softcap.softcap = 0.0
    assert patch.described(module) is None


def test_the_interface_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import moe

    chosen = []
    model_ = SimpleNamespace(
        get_experts_implementation=lambda: "grouped_mm",
        set_experts_implementation=chosen.append,
        modules=lambda: [SimpleNamespace(_apply_gate=None)],
    )
    with pytest.raises(RuntimeError, match="on the way"), patch.applied(model_):
        assert patch.NAME in moe.ALL_EXPERTS_FUNCTIONS
        raise RuntimeError("on the way")
    assert patch.NAME not in moe.ALL_EXPERTS_FUNCTIONS and chosen == [patch.NAME, "grouped_mm"]

    def batched_mm_experts_forward(self: Any, x: Any, chosen: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(moe, "batched_mm_experts_forward", batched_mm_experts_forward)
    unknown = pytest.raises(UnsupportedModelError, match=r"\(self, x, chosen\).*transformers 5")
    with patch.applied(model_), unknown:
        moe.ALL_EXPERTS_FUNCTIONS[patch.NAME](None, None, None)
