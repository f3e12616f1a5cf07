"""A Qwen3.5 of random 4-bit weights in llama.cpp: run by a Python with ``xllamacpp`` and ``gguf``.

    PYTHON tools/llama_weights.py MODEL.gguf --config config.json --threads 2

Writes the file, opens it, and answers each line of its input, two numbers, a prompt's length and a
count of tokens, by a line: milliseconds of the prompt, and of each token after it.

Matrices are Q4_0 and the tied table Q6_K, as llama.cpp's own quantiser has them for Q4_0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Kind
from llama_server import byte_names

RANDOM = np.random.default_rng(0)
ARCHITECTURE = "qwen35"
VARIANCES = {Kind.Q4_0: 21.5, Kind.Q6_K: 341.0 * 5461.0}
"""Variances of random integers times the scales within a block, before the block's own scale."""


def matrix(outputs: int, inputs: int, kind: Kind = Kind.Q4_0) -> tuple[np.ndarray, Kind]:
    """Return random blocks of a matrix with variance 1 / inputs, as bytes, and their kind."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = RANDOM.integers(256, size=(outputs, inputs // weights, size), dtype=np.uint8)
    scale = np.float16((VARIANCES[kind] * inputs) ** -0.5)
    where = slice(0, 2) if kind is Kind.Q4_0 else slice(size - 2, size)
    blocks[..., where] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(outputs, -1), kind


def tensors(sizes: dict[str, Any]) -> dict[str, np.ndarray | tuple[np.ndarray, Kind]]:
    """Return the weights by llama.cpp's names."""
    width, inside = sizes["hidden_size"], sizes["intermediate_size"]
    key_heads, heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    keys, values = (
        key_heads * sizes["linear_key_head_dim"],
        heads * sizes["linear_value_head_dim"],
    )
    head = sizes["head_dim"]
    queries, shared = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head

    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    found: dict[str, np.ndarray | tuple[np.ndarray, Kind]] = {
        "token_embd.weight": matrix(sizes["vocab_size"], width, Kind.Q6_K),
        "output_norm.weight": ones(width),
    }
    for i, kind in enumerate(sizes["layer_types"]):
        own: dict[str, np.ndarray | tuple[np.ndarray, Kind]] = {
            "attn_norm.weight": ones(width),
            "post_attention_norm.weight": ones(width),
            "ffn_gate.weight": matrix(inside, width),
            "ffn_up.weight": matrix(inside, width),
            "ffn_down.weight": matrix(width, inside),
        }
        if kind == "full_attention":
            own |= {
                "attn_q.weight": matrix(2 * queries, width),
                "attn_k.weight": matrix(shared, width),
                "attn_v.weight": matrix(shared, width),
                "attn_output.weight": matrix(width, queries),
                "attn_q_norm.weight": ones(head),
                "attn_k_norm.weight": ones(head),
            }
        else:
            channels = 2 * keys + values
            own |= {
                "attn_qkv.weight": matrix(channels, width),
                "attn_gate.weight": matrix(values, width),
                "ssm_conv1d.weight": ones(channels, sizes["linear_conv_kernel_dim"]) / 4,
                "ssm_dt.bias": ones(heads),
                "ssm_a": -ones(heads),
                "ssm_beta.weight": ones(heads, width) / width,
                "ssm_alpha.weight": ones(heads, width) / width,
                "ssm_norm.weight": ones(sizes["linear_value_head_dim"]),
                "ssm_out.weight": matrix(width, values),
            }
        found |= {f"blk.{i}.{name}": values_ for name, values_ in own.items()}
    return found


def write(path: Path, sizes: dict[str, Any]) -> None:
    """Write the model, with a vocabulary of bytes and of made-up words."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_context_length(262_144)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_block_count(len(sizes["layer_types"]))
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_rope_dimension_count(sizes["head_dim"] // 4)
    writer.add_rope_dimension_sections([sizes["head_dim"] // 8, 0, 0, 0])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_ssm_conv_kernel(sizes["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(sizes["linear_num_value_heads"] * sizes["linear_value_head_dim"])
    writer.add_ssm_state_size(sizes["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(sizes["linear_num_value_heads"])
    writer.add_ssm_group_count(sizes["linear_num_key_heads"])
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", 4)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = byte_names() + [f"word{i}" for i in range(sizes["vocab_size"] - 256)]
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["a b"])  # expected to be there; never a token
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    for name, values in tensors(sizes).items():
        if isinstance(values, tuple):
            writer.add_tensor(name, values[0], raw_dtype=values[1])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answer(server: xllamacpp.Server, prompt: np.ndarray, tokens: int) -> tuple[float, float]:
    """Return the milliseconds of a prompt, and of each of so many tokens after it."""
    found = server.handle_completions(
        {
            "prompt": prompt.tolist(),
            "n_predict": tokens,
            "cache_prompt": False,
            "ignore_eos": True,
            "samplers": ["top_k"],
            "top_k": 1,
        }
    )
    timings = found["timings"]
    assert timings["prompt_n"] == len(prompt) and timings["predicted_n"] == tokens, timings
    return timings["prompt_ms"], timings["predicted_per_token_ms"]


def main() -> None:
    """Write the model, open it, and answer until the input ends."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("path", type=Path)
    options.add_argument("--config", type=Path, required=True)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--context", type=int, default=2048, help="the most tokens of a text")
    given = options.parse_args()
    sizes = json.loads(given.config.read_text())
    write(given.path, sizes)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(given.path)
    parameters.n_parallel, parameters.n_ctx, parameters.verbosity = 1, given.context, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = given.threads
    server = xllamacpp.Server(parameters)
    print(given.path.stat().st_size, flush=True)
    for line in sys.stdin:
        length, count = map(int, line.split())
        prompt = RANDOM.integers(3, sizes["vocab_size"], size=length)
        print(*answer(server, prompt, count), flush=True)


if __name__ == "__main__":
    main()
