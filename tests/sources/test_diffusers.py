"""Folders of diffusers: SANA's transformers and the decoder of DC-AE, tiny and random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linexport.conversion.context import load_original
from linexport.errors import EnvironmentProblemError, LinexportError, UnsupportedModelError
from linexport.manifest import ConvertOptions
from linexport.passes.rewriting import rewrite
from linexport.plugins.ops.registry import attach_functions
from linexport.sources import load_model
from linexport.sources.checkpoint_weights import checkpoint_weights
from linexport.trace import trace
from tests.support.runtimes import session

diffusers = pytest.importorskip("diffusers", reason="needs the extra diffusers")
pytestmark = pytest.mark.usefixtures("one_thread")

SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 8,
    "sample_size": 8,
}
VIDEO = {
    **SANA,
    "attention_head_dim": 24,
    "cross_attention_head_dim": 24,
    "cross_attention_dim": 48,
    "patch_size": (1, 2, 2),
    "rope_max_seq_len": 16,
}
BLOCKS, SCALES = ("ResBlock", "EfficientViTBlock"), ((), (5,))
DCAE = {
    "latent_channels": 4,
    "attention_head_dim": 8,
    **{f"{side}_block_types": BLOCKS for side in ("encoder", "decoder")},
    **{f"{side}_block_out_channels": (8, 16) for side in ("encoder", "decoder")},
    **{f"{side}_layers_per_block": (1, 1) for side in ("encoder", "decoder")},
    **{f"{side}_qkv_multiscales": SCALES for side in ("encoder", "decoder")},
}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "sana": ("SanaTransformer2DModel", SANA),
    "norms": ("SanaTransformer2DModel", {**SANA, "qk_norm": "rms_norm_across_heads"}),
    "positions": ("SanaTransformer2DModel", {**SANA, "interpolation_scale": 2.0}),
    "patches": ("SanaTransformer2DModel", {**SANA, "patch_size": 2}),
    "guidance": ("SanaTransformer2DModel", {**SANA, "guidance_embeds": True}),
    "video": ("SanaVideoTransformer3DModel", VIDEO),
    "dcae": ("AutoencoderDC", DCAE),
    "interpolate": (
        "AutoencoderDC",
        {**DCAE, "upsample_block_type": "interpolate", "downsample_block_type": "stride_conv"},
    ),
}
CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"


def made(name: str) -> Any:
    kind, settings = MADE[name]
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**settings).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("diffusers")

    def saved(name: str) -> Path:
        if not (root / name).exists():
            made(name).save_pretrained(root / name)
        return root / name

    return saved


def inputs(name: str, batch: int, sizes: tuple[int, ...], tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of a model, the last row without padding."""
    generator = torch.Generator().manual_seed(batch + sum(sizes))
    latents = torch.randn(batch, 4, *sizes, generator=generator)
    if MADE[name][0] == "AutoencoderDC":
        return {"latent": latents}
    mask = torch.randint(0, 2, (batch, tokens), generator=generator)
    mask[:, 0] = mask[-1] = 1
    guided = {"guidance": torch.rand(batch, generator=generator)} if name == "guidance" else {}
    return {
        "hidden_states": latents,
        "encoder_hidden_states": torch.randn(batch, tokens, 8, generator=generator),
        "timestep": 1000 * torch.rand(batch, generator=generator),
        "encoder_attention_mask": mask,
        **guided,
    }


def in_float64(name: str, given: dict[str, torch.Tensor]) -> np.ndarray:
    """Return what diffusers itself computes."""
    model = made(name).double()
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    with torch.no_grad():
        if "latent" in wide:
            found = model.decode(wide["latent"], return_dict=False)[0]
        else:
            found = model(**wide, return_dict=False)[0]
    return np.asarray(found)


SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "patches": ((2, 2), (8, 8), (10, 6)),
    "video": ((1, 2, 2), (3, 4, 6), (16, 6, 32)),
}


QUICK = ("sana", "positions", "dcae", "video")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in MADE]
)
def test_folders_are_fused_and_equal_the_library_at_any_size(
    folder: Callable[[str], Path], name: str
) -> None:
    loaded = load_model(folder(name))
    assert loaded.source.kind == "diffusers" and loaded.source.sha256
    rewritten = rewrite(trace(loaded).model)
    assert [n.op_type for n in rewritten.model.graph.node].count("LinearAttention") == 1
    assert not [one for one in rewritten.findings.unmatched if "no input has" in one.reason]
    attach_functions(rewritten.model)
    opened = session(rewritten.model)
    for batch, sizes in enumerate(SIZES.get(name, ((1, 1), (8, 8), (11, 18))), 1):
        given = inputs(name, batch, sizes, 3 * batch)
        (got,) = opened.run(None, {n: x.numpy() for n, x in given.items()})
        expected = in_float64(name, given)
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("shard", ["10GB", "4KB"])
def test_variants_and_shards_are_the_numbers_that_they_store(
    tmp_path: Path, variant: str | None, shard: str
) -> None:
    model = made("sana")
    model = model.half() if variant else model
    model.save_pretrained(tmp_path, variant=variant, max_shard_size=shard)
    loaded = load_model(tmp_path)
    found = {n.removeprefix("model."): t for n, t in loaded.module.state_dict().items()}
    assert {t.dtype for t in found.values()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.float())


def test_dimensions_have_usual_sizes_which_the_user_may_widen(
    folder: Callable[[str], Path],
) -> None:
    loaded = load_original(folder("sana"), ConvertOptions())
    assert {n: (r.min, r.opt, r.max) for n, r in loaded.ranges.items()} == {
        "height": (1, 8, 16),
        "width": (1, 8, 16),
    }
    dims = trace(loaded).dims
    assert dims["height"].max is None and dims["batch"].batch
    assert set(load_model(folder("patches")).ranges) == {"2*height", "2*width"}
    assert load_model(folder("video")).ranges["frames"].max == 16
    assert checkpoint_weights(folder("sana")).title is None


def changed(source: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / CONFIG).read_text()) | settings
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"_class_name": "UNet2DModel"}, "converted from folders of diffusers are AutoencoderDC"),
        ({"_class_name": ["a"]}, r"_class_name is \['a'\]"),
        ({"beta": 1}, "settings that SanaTransformer2DModel of diffusers .* does not have: beta"),
        ({"num_layers": "two"}, "does not take"),
        ({"num_layers": 10**6}, "num_layers is 1,000,000; expected at most"),
        ({"num_attention_heads": 10**5}, "parameters, which the weights beside it cannot fill"),
        ({"num_layers": 2}, "transformer_blocks.1.attn1.to_k.weight is missing"),
        ({"caption_channels": 9}, r"has shape \(16, 8\), expected \(16, 9\)"),
        ({"quantization_config": {"quant_method": "quanto"}}, "weights quantised by quanto"),
        ({"patch_size": 0}, "does not take"),
        ({"sample_size": None}, "does not take|cannot be drawn"),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_sentence(
    folder: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        load_model(changed(folder("sana"), tmp_path / "changed", **settings))
    assert len(str(caught.value).splitlines()) == 1


def test_weights_that_are_not_there_are_refused(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    place = changed(folder("sana"), tmp_path / "weights")
    (place / WEIGHTS).rename(place / "diffusion_pytorch_model.bin")
    with pytest.raises(LinexportError, match=r"pickles \(diffusion_pytorch_model.bin\)"):
        load_model(place)
    (place / "diffusion_pytorch_model.bin").unlink()
    with pytest.raises(LinexportError, match=r"a configuration of diffusers .* without weights"):
        load_model(place)
    for variant in ("fp16", "bf16"):
        (place / f"diffusion_pytorch_model.{variant}.safetensors").touch()
    with pytest.raises(LinexportError, match="weights in 2 variants, bf16, fp16"):
        load_model(place)


def test_weights_that_are_nan_are_refused(tmp_path: Path) -> None:
    model = made("dcae")
    with torch.no_grad():
        model.decoder.conv_in.bias[1] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"decoder.conv_in.bias has 1 NaN of"):
        load_model(tmp_path)


def test_a_diffusers_without_the_class_or_none_at_all_is_said(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder("sana")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "diffusers", None)
        with pytest.raises(EnvironmentProblemError, match=r"needs diffusers: pip install .*diffus"):
            load_model(place)
    monkeypatch.setattr(diffusers, "SanaTransformer2DModel", None)
    with pytest.raises(EnvironmentProblemError, match="has no SanaTransformer2DModel: pip install"):
        load_model(place)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sana", "dcae", "video"])
def test_folders_convert(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    import linexport

    manifest = linexport.convert(folder(name), tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 1
    assert [o.name for o in manifest.outputs] == ["sample"]
    assert linexport.validate(tmp_path / "a").status == "ok"
