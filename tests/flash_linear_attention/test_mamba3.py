"""Mamba-3 against its recurrence, token by token in float64 with complex states.

    h_t = a_t e^{-i w_t} h_{t-1} + (1 - l_t) d_t a_t e^{-i w_t} B_{t-1} x_{t-1} + l_t d_t B_t x_t

in coordinates that turn with the tokens, where the modules have turned B and C.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

import linexport
from linexport import passes
from linexport.errors import UnsupportedModelError, UsageError
from linexport.graph import states
from linexport.models.flash_linear_attention import CausalLM, build
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.loops import session_of

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

HERE = Path(__file__).parent
SMALL = {
    "model_type": "mamba3",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "state_size": 8,
}
RANKS = {**SMALL, "is_mimo": True, "mimo_rank": 3, "n_groups": 2, "is_outproj_norm": True}

Weights = dict[str, np.ndarray]


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-softplus(-x))


def layer(w: Weights, c: dict[str, Any], u: np.ndarray) -> np.ndarray:
    """One layer, (B, T, hidden)."""
    ranks = c["mimo_rank"] if c["is_mimo"] else 1
    inner = int(c["expand"] * c["hidden_size"])
    p, n, groups, eps = c["head_dim"], c["state_size"], c["n_groups"], c["norm_eps"]
    heads, keys, batch = inner // p, ranks * groups * n, len(u)
    turning = int(n * c["rope_fraction"]) // 2
    if c["is_mimo"]:
        first = np.arange(turning)
        second = first + n // 2
    else:
        first, second = np.arange(0, 2 * turning, 2), np.arange(1, 2 * turning, 2)
    rest = np.setdiff1d(np.arange(n), [*first, *second])
    one = np.ones((heads, 1, p))
    mimo_x, mimo_z, mimo_o = (w.get(f"mimo_{name}", one) for name in "xzo")

    def complex_keys(raw: np.ndarray, name: str) -> np.ndarray:
        """(B, heads, ranks, pairs and channels that do not turn)."""
        normal = rms(raw.reshape(batch, ranks, groups, n), w[f"{name}_norm.weight"], eps)
        of_heads = np.stack([normal[:, :, head * groups // heads] for head in range(heads)], 1)
        x = of_heads + w[f"{name}_bias"]
        return np.concatenate([x[..., first] + 1j * x[..., second], x[..., rest]], -1)

    h = np.zeros((batch, heads, turning + len(rest), p), complex)
    before, outputs = h, []
    for token in np.moveaxis(u, 1, 0):
        sizes = np.cumsum([inner, inner, keys, keys, heads, heads, heads])
        projected = token @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
        z, x, b, q, dt, rate, trap, angle = np.split(projected, sizes, -1)
        d, share = softplus(dt + w["dt_bias"]), sigmoid(trap)
        a = np.exp(d * np.minimum(-softplus(rate), -c["A_floor"]))
        turn = np.exp(-1j * np.pi * np.tanh(angle)[:, None] * d[:, :, None])
        turn = np.concatenate([turn, np.ones((batch, heads, len(rest)))], -1)[..., None]
        b, q = complex_keys(b, "B"), complex_keys(q, "C")
        x = x.reshape(batch, heads, 1, p) * mimo_x
        now = np.einsum("bhrn,bhrp->bhnp", b, x)
        a, d, share = (y[:, :, None, None] for y in (a, d, share))
        h = a * turn * (h + (1 - share) * d * before) + share * d * now
        before = now
        y = np.einsum("bhrn,bhnp->bhrp", q.conj(), h).real + w["D"][:, None, None] * x
        if c["is_outproj_norm"]:
            y = rms(y, w["norm.weight"].reshape(heads, 1, p), eps)
        gate = z.reshape(batch, heads, 1, p) * mimo_z
        y = (y * gate * sigmoid(gate) * mimo_o).sum(2).reshape(batch, inner)
        outputs.append(y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0))
    return np.stack(outputs, 1)


def oracle(weights: Weights, c: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """Logits, (B, T, vocabulary)."""
    w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    h = w["backbone.embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        own = f"backbone.layers.{i}."
        normal = rms(h, w[f"{own}norm.weight"], c["norm_eps"])
        start = f"{own}mixer."
        mixer = {k.removeprefix(start): x for k, x in w.items() if k.startswith(start)}
        h = h + layer(mixer, c, normal)
    found: np.ndarray = rms(h, w["backbone.norm_f.weight"], c["norm_eps"]) @ w["lm_head.weight"].T
    return found


def drawn(config: dict[str, Any], seed: int = 0) -> tuple[CausalLM, Weights, dict[str, Any]]:
    """A model with random weights, these, and all settings."""
    torch.manual_seed(seed)
    model = build(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            scale = x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3
            x.copy_(torch.randn_like(x) * scale + ("norm" in name))
    weights = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    return model, weights, vars(model.settings)


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("label", ["mamba3", "mamba3-groups"])
def test_the_recurrence_is_that_of_the_library(label: str) -> None:
    with np.load(HERE / "recorded" / f"{label}.npz") as file:
        arrays = {name.removeprefix("weight:"): file[name] for name in file.files}
    c = json.loads(str(arrays.pop("config")))
    assert error(oracle(arrays, c, arrays["ids"]), arrays["whole"]) < 1e-5


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([2, 6, 8]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
)
@settings(max_examples=15, deadline=None)
def test_modules_compute_the_recurrence(
    groups: int, ranks: int, fraction: float, width: int, norm: bool, bias: bool, length: int
) -> None:
    config = {
        **SMALL,
        "num_hidden_layers": 1,
        "state_size": max(width, 4) if fraction < 1 else width,
        "n_groups": groups,
        "rope_fraction": fraction,
        "is_mimo": ranks > 0,
        "mimo_rank": max(ranks, 1),
        "is_outproj_norm": norm,
        "use_bias": bias,
    }
    model, weights, c = drawn(config, seed=length)
    ids = torch.randint(24, (2, length))
    expected = oracle(weights, c, ids.numpy())
    with torch.no_grad():
        got = model.double()(ids, torch.ones_like(ids)).numpy()
    assert error(got, expected) < 1e-10


def test_pieces_are_the_whole_and_angles_do_not_wear_off() -> None:
    """Of thousands of tokens that turn by more than a turn each, and are hardly forgotten."""
    model, weights, c = drawn({**RANKS, "num_hidden_layers": 1, "use_bias": True})
    with torch.no_grad():
        mixer = model.backbone.layers[0].mixer
        mixer.dt_bias += 3
        _, _, _, _, _, rate, _, angle = mixer.in_proj.bias.split(mixer.widths)
        rate -= 20
        angle += 2
    ids = torch.randint(24, (2, 5))
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 2
    source = load_module((model, (ids, torch.ones_like(ids)), dynamic), "a:layer")
    rewritten = passes.rewrite(trace(source).model).model
    found, session = states.find_states(rewritten), session_of(rewritten)
    assert [(s.op, s.shape[1:]) for s in found] == [
        ("CausalConvWithState", (84, 1)),
        ("LinearAttention", (4, 8, 8)),
    ]
    known = onnx.shape_inference.infer_shapes(rewritten).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in known}
    padded = {types[node.input[0]] for node in rewritten.graph.node if node.op_type == "Pad"}
    assert padded == {onnx.TensorProto.FLOAT}, "CUDA's provider of ONNX Runtime pads no integers"
    ids_long = torch.randint(24, (2, 3000)).numpy()
    expected = oracle(weights, c, ids_long)
    for sizes in ([3000], [7, 1, 1, 64, 1900, 1027]):
        past, got = [s.start(2) for s in found], []
        for piece in np.split(ids_long, np.cumsum(sizes)[:-1], 1):
            feeds = {s.past: x for s, x in zip(found, past, strict=True)}
            tokens = {"input_ids": piece, "attention_mask": np.ones_like(piece)}
            logits, *past = session.run(None, {**tokens, **feeds})
            got.append(logits)
        assert error(np.concatenate(got, 1), expected) < 5e-5


@pytest.mark.slow
def test_a_folder_of_ranks_becomes_an_artifact(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the hf extra")
    model, weights, c = drawn(RANKS)
    (tmp_path / "config.json").write_text(json.dumps(RANKS))
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    manifest = linexport.convert(tmp_path, tmp_path / "artifact", bench=False, dims=["seq=1:8:64"])
    assert manifest.status == "ok" and manifest.streaming.passed
    assert manifest.fused == {"LinearAttention": 2, "CausalConvWithState": 2}
    stream = linexport.load(tmp_path / "artifact", threads=1).stream()
    ids = np.random.default_rng(0).integers(24, size=(2, 40))
    parts = [stream.step(part)["logits"] for part in np.split(ids, [5, 6, 7], 1)]
    assert error(np.concatenate(parts, 1), oracle(weights, c, ids)) < 1e-5


def test_settings_that_have_no_meaning_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_fraction = 0.25 is not implemented"):
        build({**SMALL, "rope_fraction": 0.25})
    with pytest.raises(UsageError, match=r"gives 4 heads, n_groups = 3 and state_size = 8;"):
        build({**SMALL, "n_groups": 3})
    with pytest.raises(UsageError, match=r"number of heads = 2.9"):
        build({**SMALL, "head_dim": 11})
