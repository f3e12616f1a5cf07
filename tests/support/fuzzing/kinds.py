"""Kinds of cases: valid samples, what of them is mutated and how, and what is attempted.

A sample is a folder of files. Of ``graphs`` and ``modules`` nothing is mutated: the case itself is
drawn at random.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import torch

import linexport
from linexport.sources import load_model
from tests.support import ROOT, random_graphs
from tests.support.fuzzing import archives, protobufs, values

Mutation = Callable[[Random, bytes], bytes]


def nothing(folder: Path) -> None:
    """Write a sample without files."""
    (folder / "none").mkdir()


@dataclass(frozen=True)
class Kind:
    """One kind of cases.

    Attributes:
        attempt: reads the sample in a folder, or draws a case; returns what became of it.
        prepare: writes valid samples, each a folder in the one it is given; kinds that share it
            share them.
        mutations: how files are changed, by pattern of their names.
        seconds: after which an attempt counts as hanging.
    """

    attempt: Callable[[Path, Random], str]
    prepare: Callable[[Path], None] = nothing
    mutations: Mapping[str, Mutation] = field(default_factory=dict)
    seconds: float = 60

    def samples(self, folder: Path) -> Path:
        """Return the place of the valid samples in a folder for all kinds."""
        return folder / self.prepare.__name__


def load(name: str, folder: Path, random: Random) -> str:
    """Load a source as ``convert`` does."""
    load_model(folder / name)
    return "loaded"


def checkpoints(folder: Path) -> None:
    """Write linexport checkpoints of two models."""
    from linexport import models

    for name, config in (
        ("language_model", {"dim": 16, "num_heads": 2, "layers": 2}),
        ("linear_attention_layer", {"num_heads": 2, "head_dim": 4, "feature_map": "favor+"}),
    ):
        torch.manual_seed(0)
        (folder / name).mkdir()
        models.save(models.build(name, config), folder / name / "model.pt")


class Small(torch.nn.Module):
    """Attention by cumulative sums, with padding, so that guards and symbols appear."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.register_buffer("mask", torch.full((4,), float("-inf")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, T, 8)."""
        query, key, value = self.project(x).chunk(3, -1)
        query, key = query.relu(), key.relu()
        state = torch.einsum("btd,bte->btde", key, value).cumsum(1)
        output = torch.einsum("btd,btde->bte", query, state)
        padded = torch.nn.functional.pad(output, (0, 0, 0, -x.shape[1] % 4))
        return padded[:, : x.shape[1]] + self.mask.exp().sum()


@cache
def program() -> torch.export.ExportedProgram:
    """Export ``Small`` with dynamic batch and length."""
    torch.manual_seed(0)
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    return torch.export.export(Small().eval(), (torch.randn(2, 6, 8),), dynamic_shapes=dims)


def programs(folder: Path) -> None:
    """Write an exported program."""
    (folder / "small").mkdir()
    torch.export.save(program(), folder / "small" / "model.pt2")


def graphs(folder: Path) -> None:
    """Write ONNX files: random graphs, an exported model, and one with external data."""
    from linexport.trace.graph import to_onnx

    drawn = {f"random_{seed}": random_graphs.Generator(seed).draw().model for seed in (1, 2, 3)}
    exported = to_onnx(program(), {})
    for name, model in {**drawn, "exported": exported}.items():
        (folder / name).mkdir()
        onnx.save_model(model, str(folder / name / "model.onnx"))
    (folder / "external").mkdir()
    onnx.save_model(
        exported,
        str(folder / "external" / "model.onnx"),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )


def folders(folder: Path) -> None:
    """Write Hugging Face folders: of three families of transformers, and of one library more."""
    from safetensors.numpy import save_file

    from tests.support.families import TINY, save_model

    for family in ("lfm2", "qwen3_5_text", "mamba2"):
        save_model(TINY[family], family, folder / family)
    recorded = np.load(ROOT / "tests" / "flash_linear_attention" / "recorded" / "gla.npz")
    (folder / "gla").mkdir()
    (folder / "gla" / "config.json").write_text(str(recorded["config"]))
    weights = {n.removeprefix("weight:"): recorded[n] for n in recorded if n.startswith("weight:")}
    save_file(weights, folder / "gla" / "model.safetensors")


def artifacts(folder: Path) -> None:
    """Write artifacts of a layer and of a language model, with a saved state each."""
    for name in ARTIFACTS:
        linexport.convert(f"small_models:{name}", folder / name, bench=False, threads=1)
        save_state(folder / name)


ARTIFACTS = ("small", "language_model")


def save_state(folder: Path) -> None:
    """Write a saved state beside an artifact."""
    artifact = linexport.load(folder, threads=1)
    stream = artifact.stream()
    stream.step({name: np.repeat(values, 5, 1) for name, values in feeds(artifact).items()})
    stream.save(folder / "state.npz")


def use(folder: Path, random: Random) -> str:
    """Open an artifact, and run it on whatever its manifest says it takes."""
    artifact = linexport.load(folder, threads=1)
    example = feeds(artifact)
    artifact.run(example)
    artifact.stream().step(example)
    return "loaded"


def feeds(artifact: Any) -> dict[str, np.ndarray]:
    """Return zeros for the inputs that are not states, 1 for every dynamic dimension."""
    manifest = artifact.manifest
    states = {s.past for s in manifest.states}
    return {
        i.name: np.zeros([d if isinstance(d, int) else 1 for d in i.shape], i.dtype)
        for i in manifest.inputs
        if i.name not in states
    }


@cache
def opened(folder: Path) -> Any:
    """Open an artifact once."""
    return linexport.load(folder, threads=1)


def resume(folder: Path, random: Random) -> str:
    """Restore a saved state, and go on from it."""
    artifact = opened(folder)
    stream = artifact.stream()
    stream.restore(folder / "state.npz")
    stream.step(feeds(artifact))
    return "loaded"


def rewrite(folder: Path, random: Random) -> str:
    """Rewrite a random graph, and compare it with the original."""
    tally = random_graphs.tally([random.randrange(2**31)])
    if tally.wrong or tally.mistaken:
        return "wrong"
    return "missed" if tally.missed else "rewritten" if tally.found else "left as it was"


def convert(folder: Path, random: Random) -> str:
    """Convert a random module: most for short sequences, since parity at 4097 tokens takes long."""
    place = folder / "artifact"
    shutil.rmtree(place, ignore_errors=True)
    source = f"random_modules:seed_{random.randrange(2**31)}"
    dims = random.choice((("seq=1:16:200",), ("seq=1:16:200",), ("seq=1:16:200",), ()))
    manifest = linexport.convert(source, place, dims=dims, bench=False, threads=1, overwrite=True)
    if manifest.status != "ok":
        return "parity failed"
    return "fused" if manifest.fused else "converted"


KINDS: dict[str, Kind] = {
    "pt": Kind(partial(load, "model.pt"), checkpoints, {"*.pt": archives.zipped}),
    "pt2": Kind(partial(load, "model.pt2"), programs, {"*.pt2": archives.zipped}),
    "onnx": Kind(
        partial(load, "model.onnx"),
        graphs,
        {"*.onnx": partial(protobufs.mutate, kind=onnx.ModelProto), "*.bin": values.raw},
    ),
    "config": Kind(partial(load, ""), folders, {"config.json": values.json_bytes}),
    "safetensors": Kind(partial(load, ""), folders, {"*.safetensors": archives.safetensors}),
    "manifest": Kind(use, artifacts, {"manifest.json": values.json_bytes}),
    "state": Kind(resume, artifacts, {"state.npz": archives.zipped}),
    "graphs": Kind(rewrite),
    "modules": Kind(convert, seconds=300),
}
