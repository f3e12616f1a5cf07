"""llama.cpp's server on a Mamba2 of bytes: run by a Python with ``xllamacpp`` and ``gguf``.

    PYTHON tools/llama_server.py FOLDER --slots 16 --threads 2

FOLDER has ``sizes.json`` and ``weights.npz``, by the names of transformers; the file that llama.cpp
reads is written beside them. The first line of the output is the URL.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

NAMES = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
}


def byte_names() -> list[str]:
    """Return the characters by which GPT-2's tokenizer calls the bytes."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def tensor(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return name and values of a weight as llama.cpp has them."""
    layer = re.match(r"backbone\.layers\.(\d+)\.", name)
    kind = name[layer.end() :] if layer else name
    if kind == "mixer.A_log":
        values = -np.exp(values)
    if kind in ("mixer.A_log", "mixer.D"):
        values = values[:, None]
    if kind == "mixer.conv1d.weight":
        values = values[:, 0]
    if kind == "mixer.norm.weight":
        values = values[None]  # by group, of which there is one
    prefix = f"blk.{layer[1]}." if layer else ""
    return prefix + NAMES[kind], np.ascontiguousarray(values, np.float32)


def write(folder: Path, sizes: dict[str, int]) -> Path:
    """Write the model in float32, with a tokenizer of bytes."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.add_context_length(2**20)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_ssm_conv_kernel(sizes["conv_kernel"])
    writer.add_ssm_inner_size(sizes["num_heads"] * sizes["head_dim"])
    writer.add_ssm_state_size(sizes["state_size"])
    writer.add_ssm_time_step_rank(sizes["num_heads"])
    writer.add_ssm_group_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(byte_names())
    writer.add_token_types([gguf.TokenType.NORMAL] * 256)
    writer.add_token_merges(["a b"])  # expected to be there; never a token
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    for name, values in np.load(folder / "weights.npz").items():
        writer.add_tensor(*tensor(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    """Write the model and serve it until the process is ended."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--slots", type=int, default=16)
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(
        write(given.folder, json.loads((given.folder / "sizes.json").read_text()))
    )
    parameters.n_parallel, parameters.n_ctx = given.slots, given.slots * 2048
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = given.threads
    parameters.port = 0
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
