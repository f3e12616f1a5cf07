"""Continue a text with the converted language model, byte by byte, from its state.

python tools/continue_text.py ARTIFACT [PROMPT]
"""

from __future__ import annotations

import sys

import numpy as np

import linexport


def main(artifact: str, prompt: str = "def __init__(self, ", count: int = 120) -> None:
    stream = linexport.load(artifact).stream()
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)[None]
    print(f"The artifact continues {prompt!r}:\n")
    print(prompt, end="")
    for _ in range(count):
        logits = stream.step(tokens)["output"]
        tokens = logits[:, -1:].argmax(-1)
        print(chr(int(tokens[0, 0])), end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
