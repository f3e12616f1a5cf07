"""Convert a layer of each class of ``fla.layers``, without a GPU, and write what became of it.

    python tools/count_gpu_layers.py --json docs/data/gpu_layers.json
    python tools/count_gpu_layers.py GatedDeltaNet Mamba2

Each is a small layer with random weights between two linear layers. It needs no GPU, and
flash-linear-attention in an environment of its own with linexport.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import measurement
import torch
from torch import Tensor, nn

import linexport
from linexport.errors import LinexportError
from linexport.patches.gpu_kernels import absent
from linexport.patches.gpu_kernels.refused import USE_LISTED

WIDTH, LENGTH = 64, 96
COMMON = {"hidden_size": WIDTH, "num_heads": 2, "head_dim": 32, "layer_idx": 0, "num_slots": 16}
"""Arguments of every layer that has them."""

OWN: dict[str, dict[str, Any]] = {
    "BasedLinearAttention": {"num_key_value_heads": 2, "feature_dim": 8},
    "HGRN2Attention": {"expand_ratio": 32},
    "LogLinearMamba2": {"num_heads": 4, "state_size": 16},
    "Mamba": {"state_size": 16},
    "Mamba2": {"num_heads": 4, "state_size": 16, "chunk_size": 32},
    "Mamba3": {"state_size": 16},
    "NativeSparseAttention": {"num_heads": 16, "num_kv_heads": 1},
    "RWKV7Attention": {"num_hidden_layers": 2},
    "Raven": {"topk": 4, "add_gumbel_noise": False},
    "ReBasedLinearAttention": {"num_key_value_heads": 2, "feature_dim": 8},
    "SlidingWindowSharedKeyAttention": {"window_size": 16},
}
"""Arguments of some layers."""

NOTHING = {"YOCOCrossAttention", "YOCOSharedKVBuilder"}
"""Parts of a layer, which are not called with hidden states alone or do not return them."""

WITHOUT_MASK = {"MultiheadLatentAttention"}
"""Layers whose mask has no default."""


FAILS = re.compile(r".*the model itself fails.*?\)?\): (.*?)\. It was run on .*")
"""An error of the layer's own code, without the line of this file."""


class Net(nn.Module):
    """A layer between two linear layers."""

    def __init__(self, layer: nn.Module, mask: bool = True) -> None:
        super().__init__()
        self.given = {} if mask else {"attention_mask": None}
        self.first, self.layer = nn.Linear(16, WIDTH), layer
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(self.first(x), **self.given)
        y: Tensor = self.last(found[0] if isinstance(found, tuple) else found)
        return y


def build(name: str) -> Net:
    """Return a small network with a layer of a class, its weights random."""
    layer = getattr(importlib.import_module("fla.layers"), name)
    parameters = inspect.signature(layer).parameters
    given = {key: value for key, value in COMMON.items() if key in parameters}
    torch.manual_seed(0)
    mixer = layer(**{**given, **OWN.get(name, {})})
    net = Net(mixer, name not in WITHOUT_MASK).eval()
    for weight in net.parameters():
        if weight.dim() > 1 and not weight.any():  # those that begin with nothing say nothing
            nn.init.normal_(weight, std=0.1)
    return net


def outcome(name: str) -> dict[str, Any]:
    """Return the row of a layer: whether it converts, how much is fused, and why not."""
    row: dict[str, Any] = {"layer": name, "converts": False, "fused": {}, "streams": False}
    try:
        with tempfile.TemporaryDirectory() as folder:
            given = (torch.randn(2, LENGTH, 16),)
            manifest = linexport.convert(
                build(name), args=given, output=Path(folder) / "out", bench=False
            )
    except LinexportError as error:
        said = FAILS.sub(r"\1.", str(error).splitlines()[0])
        return row | {"reason": said.removesuffix(f" {USE_LISTED}.")}
    except Exception as error:  # of the layer's own constructor
        return row | {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    parity, streaming = manifest.parity, manifest.streaming
    errors = [kernel.error for kernel in manifest.kernels if kernel.error is not None]
    return row | {
        "converts": manifest.status == "ok",
        "fused": manifest.fused,
        "streams": bool(streaming and streaming.passed),
        "shortest": manifest.dims["seq"].min if "seq" in manifest.dims else None,
        "error": None if parity is None else parity.max_relative_error,
        "kernels": [kernel.name.rpartition(".")[2] for kernel in manifest.kernels],
        "reference_error": max(errors, default=None),
        "reason": "" if manifest.status == "ok" else manifest.failure,
    }


def layers() -> list[str]:
    """Return the names of the classes."""
    with absent.standing_in(absent.KNOWN):
        module = importlib.import_module("fla.layers")
    return sorted(
        name
        for name in module.__all__
        if inspect.isclass(getattr(module, name)) and name not in NOTHING
    )


def main() -> None:
    """Convert the layers and print a line for each."""
    warnings.simplefilter("ignore")
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("layers", nargs="*", metavar="LAYER", help="all, if none is given")
    measurement.add_option(options)
    given = options.parse_args()
    known = layers()
    unknown = set(given.layers) - set(known)
    if unknown:
        options.error(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
    kept = measurement.read(given.json)["rows"] if given.json and given.json.exists() else []
    rows = {row["layer"]: row for row in kept if row["layer"] in known}
    for name in given.layers or known:
        row = rows[name] = outcome(name)
        print(", ".join(f"{value}" for value in row.values()), flush=True)
        ordered = [rows[one] for one in known if one in rows]
        measurement.write(given.json, {"rows": ordered})


if __name__ == "__main__":
    main()
