"""Every model type of transformers with such layers, found in its own sources, is accounted for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

import linexport
from linexport.errors import UnsupportedModelError
from linexport.sources import load_model
from linexport.sources.hugging_face.vision import TOWERS
from tests.support import ROOT
from tests.support.families import BASES, LINEAR_LAYERS, TINY, WITH_TOWERS, save_model
from tests.support.towers import WITH_PICTURES

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = ROOT / "docs/data/model_types.json"

LIBRARY = Path(transformers.__file__).parent / "models"

LAYERS = re.compile(
    "update_conv_state|update_recurrent_state|create_recurrent_attention_mask|causal_conv1d|conv_state"
    "|delta_rule|delta_attention|selective_scan|chunk_scan|ssm_state|recurrent_state|linear_attention"
    "|LinearAttention|LightningAttention|RgLru|rg_lru|wkv_|mlstm|mLSTM|ShortConv"
)
"""Names in modeling files of linear recurrences, state spaces, short convolutions, and states."""

INNER = re.compile(r'model_type="(\w+)"')
"""Model type of a part, in a configuration file."""

OTHERS = {
    "jev": "one decision for a text with marks: refused by its head",
    "pvt_v2": "images; what it calls linear attention is softmax over few pooled pixels",
}


def folders() -> set[str]:
    """Folders of models that have such layers, or a part that has them."""
    own = {p.parent.name for p in LIBRARY.glob("*/modeling_*.py") if LAYERS.search(p.read_text())}
    types = {name for name, kind in transformers.CONFIG_MAPPING.items() if folder(kind) in own}
    return own | {
        path.parent.name
        for path in LIBRARY.glob("*/configuration_*.py")
        if types & set(INNER.findall(path.read_text()))
    }


def folder(kind: type) -> str:
    return kind.__module__.split(".")[-2]


def language_models() -> Iterator[tuple[str, str]]:
    """Yield folder and model type of what writes texts."""
    for name, kind in transformers.CONFIG_MAPPING.items():
        if (
            kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            or kind in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
        ):
            yield folder(kind), name


@pytest.mark.services
def test_every_type_is_converted_by_a_test() -> None:
    """One more in a new version of the library fails here: add it to ``tests.support.families``."""
    found, known = folders(), {*TINY, *WITH_TOWERS, *TOWERS, *BASES}
    assert len(found) > 30
    types = {name for place, name in language_models() if place in found}
    accounted = {folder(transformers.CONFIG_MAPPING[name]) for name in known}
    assert types <= known
    assert found - accounted == OTHERS.keys()


@pytest.mark.slow
def test_all_types_are_converted_and_their_table_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table's numbers are those of this run; ``tools/generate_docs.py`` shows them."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import count_model_types

    monkeypatch.setattr("sys.argv", ["count_model_types.py", "--json", str(TABLE)])
    count_model_types.main()
    rows = {row["model_type"]: row for row in json.loads(TABLE.read_text())["result"]["rows"]}
    assert rows.keys() == {*TINY, *WITH_TOWERS, *WITH_PICTURES, *BASES}
    for name, row in rows.items():
        assert row["status"] == "ok" and row["streams"] and row["error"] <= 5e-5
        if name in LINEAR_LAYERS:
            assert row["fused"].get("LinearAttention", 0) == LINEAR_LAYERS[name]


def test_a_model_that_takes_marks_is_refused_by_its_head(tmp_path: Path) -> None:
    config = {"model_type": "jev", "architectures": ["JevForDecision"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="the architecture JevForDecision"):
        load_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*WITH_TOWERS, "lfm2_vl"])
def test_a_language_model_is_converted_without_its_towers(
    model_type: str, model_with_towers: Callable[[str], Path], tmp_path: Path
) -> None:
    manifest = linexport.convert(
        model_with_towers(model_type), tmp_path / "out", vision=False, bench=False, threads=1
    )
    assert manifest.status == "ok" and manifest.streaming.passed
    assert "takes text alone" in manifest.warnings[0]


@pytest.mark.services
@pytest.mark.parametrize("model_type", [*WITH_TOWERS, "lfm2_vl"])
def test_a_language_model_is_traced_without_its_towers(
    model_type: str, model_with_towers: Callable[[str], Path]
) -> None:
    """Whole, and in pieces with states, it gives what the library's own call with towers gives."""
    import torch

    loaded = load_model(model_with_towers(model_type), vision=False)
    assert loaded.vision is None and "takes text alone" in loaded.warnings[0]
    step: Any = loaded.decode_module
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        expected, past, parts = loaded.module(ids, mask), {}, []
        with step.patched():
            for piece, own in zip(ids.split([30, 1, 9], 1), mask.split([30, 1, 9], 1), strict=True):
                output, past = step.module(piece, own, past)
                parts.append(output)
    kept = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[kept], expected[kept], atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def model_with_towers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_with_towers(model_type)``: such a folder, made once."""
    made: dict[str, Path] = {}

    def save(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type)
            config = {**WITH_TOWERS, **WITH_PICTURES}[model_type]
            save_model(config, model_type, made[model_type], "AutoModelForMultimodalLM")
        return made[model_type]

    return save
