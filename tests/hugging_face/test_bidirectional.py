"""Encoders of LFM2's layers: beside the library's model with other masks and convolutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.lfm2 import modeling_lfm2

import linexport
from linexport.errors import LinexportError
from linexport.sources import load_model
from tests.support.sentence_folder import NORMALIZE, pooling, save_sentence_model

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = "raise SystemExit('the code of a folder was run')\n"


def encoder(place: Path, **changes: Any) -> Path:
    """A folder as LFM2.5-Embedding has it, with code that must not be run."""
    save_sentence_model("lfm2", place, [pooling(32, "pooling_mode_cls_token"), NORMALIZE])
    path = place / "config.json"
    named = {
        "architectures": ["Lfm2BidirectionalModel"],
        "auto_map": {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **named, **changes}))
    (place / "modeling_lfm2_bidirectional.py").write_text(CODE)
    return place


def centred(block: Any, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    """The gated convolution token by token, each with its neighbours."""
    before, after, inner = block.in_proj(hidden_states).chunk(3, -1)
    x, weight = (before * inner)[0], block.conv.weight[:, 0]
    reach, length = weight.shape[1] // 2, len(x)
    mixed = torch.zeros_like(x)
    for t in range(length):
        for i in range(weight.shape[1]):
            if 0 <= t + i - reach < length:
                mixed[t] += weight[:, i] * x[t + i - reach]
    return block.out_proj(after * mixed[None])  # type: ignore[no-any-return]


def test_each_row_is_seen_whole_and_by_its_own_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = encoder(tmp_path / "model")
    ids = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 9).long()
    mask[1, 4:], mask[2, :7] = 0, 0
    with torch.no_grad():
        found = load_model(place).module(ids, mask).numpy()
    config = transformers.Lfm2Config.from_pretrained(place)
    model = transformers.Lfm2Model.from_pretrained(
        place, config=config, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    monkeypatch.setattr(modeling_lfm2, "create_causal_mask", lambda **_: None)
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", centred)
    for row, kept in enumerate(mask.bool()):
        with torch.no_grad():
            first = model(input_ids=ids[row : row + 1, kept]).last_hidden_state[0, 0].numpy()
        np.testing.assert_allclose(found[row], first / np.linalg.norm(first), atol=2e-6)


@pytest.mark.services
def test_an_encoder_converts_without_its_code(tmp_path: Path) -> None:
    manifest = linexport.convert(
        encoder(tmp_path / "model"), tmp_path / "out", bench=False, threads=1
    )
    assert (manifest.status, manifest.head) == ("ok", "pooled")
    model = linexport.load(tmp_path / "out", threads=1)
    both = model.embed(["a cat", "the bonds of the day"], prompt="document")
    np.testing.assert_allclose(both[0], model.embed("a cat", prompt="document"), atol=1e-6)
    # The first token's vector depends on the last one.
    assert abs(both[0] - model.embed("a car", prompt="document")).max() > 1e-3


def test_a_convolution_without_a_middle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinexportError, match="conv_L_cache 4; a centred convolution"):
        load_model(encoder(tmp_path / "model", conv_L_cache=4))
