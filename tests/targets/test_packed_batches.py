"""Packed batches: sequences of their own lengths side by side are as each of them alone.

The operators that take them are compared with float64 oracles, by the functions that stand for them
and by ONNX Runtime's own kernels where it has them (1.32 on the CPU); then whole models, with the
PyTorch original in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import linexport
from linexport import manifest as manifests
from linexport import package, targets
from linexport.errors import UnsupportedModelError, UsageError
from linexport.plugins.ops import causal_conv_tokens
from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.plugins.ops.op import Node
from linexport.report import snippet
from linexport.targets.lowering import gated_delta_net, op_functions, varlen_conv
from linexport.targets.lowering.packed_batches import ENDS
from tests.support.command_line import Result
from tests.support.factories import small_models
from tests.support.gated_delta_net import calls, has_kernel, opened, opens, recurrence

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 2e-5
"""Of the largest value: float32 sums in another order."""

PACKED = {"target": "ort-cuda", "packed_batches": True}


def ends_of(lengths: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def side_by_side(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(n, ...) of each sequence as (1, all, ...)."""
    return np.concatenate(rows)[None]


def assert_close(got: np.ndarray, right: np.ndarray) -> None:
    assert got.shape == right.shape
    assert np.abs(got - right).max(initial=0) <= TOLERANCE * max(1, np.abs(right).max(initial=0))


def check(body: Body, outputs: Sequence[str], fed: dict[str, np.ndarray], op: str) -> list[list]:
    """What a body computes by its function, and by the kernel where there is one."""
    typed = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for n, x in fed.items()
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(body.nodes, "call", typed, made)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with opens(op):
        opened(model)
    runs = [op_functions.defined(model), *([model] if has_kernel(op) else [])]
    return [opened(one).run(None, fed) for one in runs]


@given(drawn=calls(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_attention_of_sequences_side_by_side(drawn: tuple, data: st.DataObject) -> None:
    rule, scale, _, per_head, split = drawn
    batch, longest, shared, _ = split["q"].shape
    heads = split["v"].shape[2]
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=batch, max_size=batch))
    fed = {
        n: side_by_side([x[i, :length].reshape(length, -1) for i, length in enumerate(lengths)])
        for n, x in split.items()
        if n != "S"
    }
    fed["beta"] = fed["beta"] if per_head else fed["beta"][..., :1]
    unread = {"g": "gated" not in rule, "beta": "delta" not in rule}
    fed = {n: x for n, x in fed.items() if not unread.get(n, False)} | {"S": split["S"]}
    spec = LinearAttentionSpec(shared, heads, update_rule=rule, scale=scale)
    shapes = {n: (1, None, x.shape[-1]) for n, x in fed.items() if n != "S"}
    sizes = spec.check(*(shapes[n] for n in "qkv"), decay=shapes.get("g"), beta=shapes.get("beta"))
    b = Body()
    names = tuple(n if n in fed else "" for n in ("q", "k", "v", "S", "g", "beta"))
    outputs = gated_delta_net.call(b, spec, sizes, names, ENDS)
    for output, state in check(b, outputs, fed | {ENDS: ends_of(lengths)}, gated_delta_net.OP):
        for i, (start, end) in enumerate(pairwise(ends_of(lengths))):
            alone = {n: x[i : i + 1, : end - start] for n, x in split.items() if n != "S"}
            right, last = recurrence(alone | {"S": split["S"][i : i + 1]}, rule, scale)
            assert_close(output[:, start:end], right.reshape(1, end - start, -1))
            assert_close(state[i : i + 1], last)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(("none", "silu")),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_convolutions_of_sequences_side_by_side(
    lengths: list[int], channels: int, size: int, biased: bool, activation: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    fed = {"input": random.normal(size=(1, sum(lengths), channels))}
    fed["weight"] = random.normal(size=(channels, 1, size))
    fed |= {"bias": random.normal(size=channels)} if biased else {}
    fed["past_state"] = random.normal(size=(len(lengths), channels, size - 1))
    fed = {name: x.astype(np.float32) for name, x in fed.items()}
    given_names = tuple(n if n in fed else "" for n in ("input", "weight", "bias", "past_state"))
    shapes = {name: x.shape for name, x in fed.items()}
    node = Node("CausalConvTokens", {"activation": activation}, given_names, shapes)
    b, outputs = varlen_conv.lowering(node, ENDS)
    for output, state in check(b, outputs, fed | {ENDS: ends_of(lengths)}, varlen_conv.OP):
        for i, (start, end) in enumerate(pairwise(ends_of(lengths))):
            alone = fed["input"][:, start:end]
            right, last = causal_conv_tokens.causal_conv_tokens(
                activation, alone, fed["weight"], fed.get("bias"), fed["past_state"][i : i + 1]
            )
            assert_close(output[:, start:end], right)
            assert_close(state[i : i + 1], last)


def test_packed_batches_are_in_the_schemas(capfd: pytest.CaptureFixture[str]) -> None:
    """Sequences of their own lengths, 7 tokens in all.

    ONNX Runtime names the shapes that it infers where others are declared.
    """
    shapes = {"q": (7, 2, 8), "v": (7, 4, 6), "g": (7, 4), "S": (2, 4, 6, 8), "ends": (3,)}
    shapes |= {"x": (7, 5), "w": (5, 1, 4), "past": (2, 5, 3), "output": (0,), "state": (0,)}
    typed = {
        name: helper.make_tensor_value_info(
            name, TensorProto.INT32 if name == "ends" else TensorProto.FLOAT, shape
        )
        for name, shape in shapes.items()
    }
    delta = (gated_delta_net.OP, ("q", "q", "v", "ends", "g", "g", "S"), "7,4,6", "2,4,6,8")
    convolution = ("VarlenCausalConvWithState", ("x", "w", "ends", "", "past"), "7,5", "2,5,3")
    for name, inputs, *inferred in (delta, convolution):
        node = helper.make_node(name, inputs, ["output", "state"], domain=MICROSOFT)
        read = [typed[x] for x in dict.fromkeys(inputs) if x]
        graph = helper.make_graph([node], "packed", read, [typed["output"], typed["state"]])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        with opens(name):
            opened(model)
        said = capfd.readouterr().err
        assert all(f"source:{{{shape}}}" in said for shape in inferred), said


def run(
    model: targets.InferenceSession,
    manifest: linexport.Manifest,
    pieces: Sequence[np.ndarray],
    states: dict[str, np.ndarray] | None = None,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Outputs of each piece (1, n, ...), and the states, by a call of all side by side."""
    if states is None:
        states = {
            s.past: np.full([len(pieces), *s.shape[1:]], s.initial, s.dtype)
            for s in manifest.states
        }
    ends = ends_of([piece.shape[1] for piece in pieces])
    name = next(i.name for i in manifest.inputs if i.name not in states)
    found = model.run({name: np.concatenate(pieces, 1), ENDS: ends, **states})
    following = {s.past: found[s.present] for s in manifest.states}
    return np.split(found[manifest.outputs[0].name], ends[1:-1], axis=1), following


@pytest.mark.parametrize("source", ["language_model", "two_steps_a_token"])
def test_a_model_computes_sequences_of_any_lengths_as_each_alone(
    converted: Callable[..., Path], source: str
) -> None:
    folder = converted(source, **PACKED)
    manifest = manifests.read(folder)
    opened_model = targets.find_target("ort-cuda").open(folder / "model.onnx")
    torch.manual_seed(0)  # as a conversion does
    module, (example, *_), *_ = getattr(small_models, source)()
    module = module.double().eval()
    lengths, first = (9, 2, 33, 4), (4, 1, 30, 1)
    if example.is_floating_point():
        whole = [torch.randn(1, n, *example.shape[2:]) for n in lengths]
    else:
        whole = [torch.randint(256, (1, n)) for n in lengths]
    with torch.no_grad():
        right = [module(x.double() if x.is_floating_point() else x).numpy() for x in whole]
    begun, states = run(
        opened_model, manifest, [x[:, :n].numpy() for x, n in zip(whole, first, strict=True)]
    )
    rest, _ = run(
        opened_model,
        manifest,
        [x[:, n:].numpy() for x, n in zip(whole, first, strict=True)],
        states,
    )
    for one, other, wanted in zip(begun, rest, right, strict=True):
        assert_close(np.concatenate([one, other], 1), wanted)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("streaming", "its state past_length is of Positions"),
        ("beside_softmax", "is of PaddingMask; those of linear attention"),
        ("fixed_batch", "its batch is fixed at 3"),
        ("averaging", "it does not stream: "),
        ("returns_state", "its output output_1 is .*; expected .*tokens"),
        ("time_first", "its input x is .*; expected .*tokens"),
        ("named_as_the_ends", "it has a value called cu_seqlens"),
        ("shared_queries", "2 query, 1 key/value heads .* a block for each head"),
    ],
)
def test_a_model_without_a_packed_form_is_refused_with_the_reason(
    factories: SimpleNamespace, tmp_path: Path, source: str, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        linexport.convert(factories.source(source), tmp_path / "a", bench=False, **PACKED)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "ort"}, "packed_batches=True of that alone; found target ort"),
        ({"target": "tensorrt-rtx"}, "packed_batches=True are of target ort-cuda"),
        ({"sms": (90,)}, "ONNX Runtime's kernels, and sms for linexport's"),
        ({"inline": True}, "inline=True puts"),
    ],
)
def test_options_that_contradict_packed_batches(
    factories: SimpleNamespace, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        linexport.convert(factories.source("small"), tmp_path / "a", **{**PACKED, **options})


def test_an_artifact_says_what_its_graph_takes(
    converted: Callable[..., Path], cli: Callable[..., Result], tmp_path: Path
) -> None:
    folder = converted("language_model", **PACKED)
    manifest = manifests.read(folder)
    assert manifest.packed is not None and manifest.packed.ends == ENDS
    assert manifest.library is None  # it takes rows alone
    assert manifest.inputs[0].shape == ("batch", "seq")
    assert manifest.packed.inputs[0].shape == (1, "tokens")
    shown = cli("inspect", folder).out
    assert (
        "packed batches" in shown and "VarlenCausalConv" in shown and "not installed" not in shown
    )
    with pytest.raises(UsageError, match="takes packed batches, and triton gives rows"):
        package.package(folder, package.find_destination("triton"), tmp_path / "t")
    stated = json.loads((folder / "manifest.json").read_text())
    stated["packed"]["inputs"][0]["shape"] = [1, "other"]
    (tmp_path / "a").mkdir()
    for file in folder.iterdir():
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(stated))
    with pytest.raises(UsageError, match="does not describe its model file"):
        linexport.load(tmp_path / "a")


def test_the_printed_code_runs(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted("language_model", **PACKED)
    code = snippet.with_onnxruntime(manifests.read(folder)).replace("CUDAExec", "CPUExec")
    assert "[0, 3, 5]" in code
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    with opens(varlen_conv.OP):
        exec(code, names)
        assert names["outputs"]["output"].shape[:2] == (1, 5)  # type: ignore[index]
