"""Heads for multi-token prediction: written to checkpoints, and computed in float64 as published.

The layout is that of Qwen3-Next's and Qwen3.5's weights ``mtp.*``. Nothing here is linexport's or
transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Weights = Mapping[str, np.ndarray]

NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def text_config(folder: Path) -> dict[str, Any]:
    """The configuration of the language model in a folder."""
    config = json.loads((folder / "config.json").read_text())
    found: dict[str, Any] = config.get("text_config", config)
    return found


def add_head(folder: Path, seed: int = 1, **given: torch.Tensor) -> None:
    """Write a head of random weights, or of those given by their names after ``mtp.``."""
    path, config = folder / "model.safetensors", text_config(folder)
    weights = load_file(path)
    [start] = {
        n.split("layers.")[0] for n in weights if ".layers.1." in f".{n}" and "visual" not in n
    }
    like = f"{start}layers.{config['layer_types'].index('full_attention')}."
    torch.manual_seed(seed)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape)
        return 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5

    width = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        **{f"layers.0.{n[len(like) :]}": w.shape for n, w in weights.items() if n.startswith(like)},
        **{f"{n}.weight": (width,) for n in NORMS},
        "fc": (width, 2 * width),
    }
    named = {
        n if n.endswith("weight") or "experts" in n else f"{n}.weight": shapes[n] for n in shapes
    }
    head = {f"mtp.{n}": given.get(n, drawn(shape)) for n, shape in named.items()}
    save_file({**weights, **head}, path, {"format": "pt"})


class Oracle:
    """The head of a folder, in float64, computed from scratch at every call."""

    def __init__(self, folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        self.config = text_config(folder)
        values = {n: w.double().numpy() for n, w in found.items()}
        self.mtp = {n.removeprefix("mtp."): w for n, w in values.items() if n.startswith("mtp.")}
        [self.embeddings] = [w for n, w in values.items() if n.endswith("embed_tokens.weight")]
        self.head = values.get("lm_head.weight", self.embeddings)

    def __call__(self, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits (T, V) and g (T, width) for tokens 1 ... T and the hidden states before each."""
        token = self._norm(self.embeddings[tokens], self.mtp["pre_fc_norm_embedding.weight"])
        before = self._norm(hidden, self.mtp["pre_fc_norm_hidden.weight"])
        x = np.concatenate([token, before], -1) @ self.mtp["fc.weight"].T
        layer = {n.removeprefix("layers.0."): w for n, w in self.mtp.items() if "layers.0." in n}
        x = x + self._attention(self._norm(x, layer["input_layernorm.weight"]), layer)
        x = x + self._mlp(self._norm(x, layer["post_attention_layernorm.weight"]), layer)
        g = self._norm(x, self.mtp["norm.weight"])
        return g @ self.head.T, g

    def proposed(self, tokens: np.ndarray, hidden: np.ndarray, count: int) -> list[int]:
        """The argmax after tokens, each further one with g in the place of a hidden state."""
        found: list[int] = []
        for _ in range(count):
            logits, g = self(tokens, hidden)
            found.append(int(logits[-1].argmax()))
            tokens, hidden = np.append(tokens, found[-1]), np.concatenate([hidden, g[-1:]])
        return found

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / size * (1 + weight)

    def _attention(self, x: np.ndarray, layer: Weights) -> np.ndarray:
        heads, groups = (self.config[f"num_{n}_heads"] for n in ("attention", "key_value"))
        width, length = self.config["head_dim"], len(x)
        both = (x @ layer["self_attn.q_proj.weight"].T).reshape(length, heads, 2 * width)
        query, gate = both[..., :width], both[..., width:]
        key = (x @ layer["self_attn.k_proj.weight"].T).reshape(length, groups, width)
        value = (x @ layer["self_attn.v_proj.weight"].T).reshape(length, groups, width)
        query = self._rotated(self._norm(query, layer["self_attn.q_norm.weight"]))
        key = self._rotated(self._norm(key, layer["self_attn.k_norm.weight"]))
        out = np.zeros_like(query)
        for head in range(heads):
            group = head // (heads // groups)
            scores = query[:, head] @ key[:, group].T * width**-0.5
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, group]
        mixed: np.ndarray = (out * _sigmoid(gate)).reshape(length, -1)
        return mixed @ layer["self_attn.o_proj.weight"].T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        rope = self.config["rope_parameters"]
        turned = int(x.shape[-1] * rope["partial_rotary_factor"])
        rates = rope["rope_theta"] ** -(np.arange(0, turned, 2) / turned)
        angle = np.arange(len(x))[:, None, None] * rates
        a, b, rest = x[..., : turned // 2], x[..., turned // 2 : turned], x[..., turned:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _mlp(self, x: np.ndarray, layer: Weights) -> np.ndarray:
        if "mlp.gate.weight" not in layer:
            return _swiglu(x, layer, "mlp")
        logits = x @ layer["mlp.gate.weight"].T
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        shared = _swiglu(x, layer, "mlp.shared_expert")
        out = _sigmoid(x @ layer["mlp.shared_expert_gate.weight"].T) * shared
        for row, score in enumerate(scores):
            chosen = np.argsort(-score)[: self.config["num_experts_per_tok"]]
            for expert in chosen:
                given = _swiglu(x[row], layer, f"mlp.experts.{expert}")
                out[row] += score[expert] / score[chosen].sum() * given
        return out


def _swiglu(x: np.ndarray, layer: Weights, name: str) -> np.ndarray:
    gate, up, down = (layer[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    y = x @ gate.T
    return (y * _sigmoid(y) * (x @ up.T)) @ down.T


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
