"""Files that pages of the documentation begin with, made once a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.sentence_folder import NORMALIZE, dense, pooling, save_sentence_model


def _model(folder: Path) -> None:
    """``model.pt``: the example language model, untrained."""
    from linexport import models

    models.save(
        models.build("language_model", {"dim": 32, "num_heads": 2, "layers": 2}),
        folder / "model.pt",
    )


def _artifact(folder: Path) -> None:
    """``artifact``: that model, converted without measurement."""
    import linexport

    _model(folder)
    linexport.convert(folder / "model.pt", folder / "artifact", bench=False)


def _hybrid(folder: Path) -> None:
    """``tiny-qwen``: the untrained hybrid of the page on Hugging Face models."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "tiny-qwen")


def _embedder(folder: Path) -> None:
    """``tiny-embedder``: an untrained embedding model, as sentence-transformers saves it."""
    modules = [pooling(32, "pooling_mode_mean_tokens"), dense(32, 24), NORMALIZE]
    save_sentence_model("mamba2", folder / "tiny-embedder", modules)


def _streaming(folder: Path) -> None:
    """``streaming``: the programs of the example."""
    shutil.copytree(ROOT / "examples" / "streaming", folder / "streaming")


MAKERS: dict[str, Callable[[Path], None]] = {
    "model.pt": _model,
    "artifact": _artifact,
    "tiny-qwen": _hybrid,
    "tiny-embedder": _embedder,
    "streaming": _streaming,
}


@pytest.fixture(scope="session")
def provide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """``provide(name, folder)``: put the file or folder of that name there."""
    made: dict[str, Path] = {}

    def copy(name: str, folder: Path) -> None:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("given")
            MAKERS[name](made[name])
        source, target = made[name] / name, folder / name
        if target.exists():
            return
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)

    return copy
