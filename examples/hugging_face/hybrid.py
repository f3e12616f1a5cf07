"""A Hugging Face hybrid with random weights: save, convert, and continue a sequence of tokens.

    python hybrid.py FOLDER

Two layers, gated delta net and softmax attention, as Qwen3.5 alternates them. Nothing is
downloaded. A real model folder takes the same three calls.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import linexport

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}


def main(folder: Path) -> None:
    """Write ``model/`` and ``artifact/`` to the folder, and print tokens of both."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **CONFIG)).eval()
    model.save_pretrained(folder / "model")

    linexport.convert(folder / "model", folder / "artifact", bench=False)
    artifact = linexport.load(folder / "artifact")

    prompt = [5, 7, 11, 13]
    continued = list(artifact.generate(prompt, max_tokens=8, stop=()))
    with torch.no_grad():
        tokens = torch.tensor([prompt])
        for _ in range(8):
            best = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], dim=1)
    print("linexport   ", continued)
    print("transformers", tokens[0, len(prompt) :].tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
