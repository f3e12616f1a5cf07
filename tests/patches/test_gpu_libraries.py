"""Modules of fla and mamba_ssm themselves, where they are installed: neither needs a GPU."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import linexport
from linexport.patches import fla_mamba2, gpu_kernels
from linexport.patches.gpu_kernels import absent, layers, padding
from linexport.sources.factory import load_module

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

FLA = (
    ("DeltaNet", {}),
    ("GatedDeltaNet", {}),
    ("GatedDeltaNet2", {}),
    ("GatedDeltaProduct", {}),
    ("GatedLinearAttention", {}),
    ("GatedSlotAttention", {"num_slots": 16}),
    ("HGRNAttention", {}),
    ("HGRN2Attention", {"expand_ratio": 32}),
    ("KimiDeltaAttention", {}),
    ("LinearAttention", {}),
    ("MultiScaleRetention", {}),
    ("RWKV6Attention", {}),
    ("RodimusAttention", {}),
)
COMMON = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "layer_idx": 0}


class Net(nn.Module):
    """A layer between two linear layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(16, 64), layer, nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.layer(self.first(x))
        return self.last(found[0] if isinstance(found, tuple) else found)


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    with warnings.catch_warnings(), absent.standing_in(absent.needed()):
        warnings.simplefilter("ignore")
        yield pytest.importorskip(request.param, exc_type=ImportError)


def layer_of(library: Any, name: str, given: dict[str, Any]) -> nn.Module:
    """A layer of fla with those of the common arguments that it knows, and its own."""
    kind = getattr(library, name)
    known = kind.__init__.__code__.co_varnames
    torch.manual_seed(0)
    made: nn.Module = kind(**{n: x for n, x in COMMON.items() if n in known} | given)
    return made.eval()


@pytest.mark.parametrize("library", ["fla.layers"], indirect=True)
@pytest.mark.parametrize(("name", "given"), FLA)
def test_kernels_of_fla_equal_its_own_references(
    library: Any, name: str, given: dict[str, Any]
) -> None:
    net = Net(layer_of(library, name, given)).eval()
    loaded = load_module((net, (torch.randn(2, 80, 16),)), name)
    compared = [kernel.error for kernel in loaded.kernels if kernel.error is not None]
    assert compared
    assert max(compared) < 1e-5


@pytest.mark.parametrize("library", ["fla.layers"], indirect=True)
def test_a_layer_of_fla_converts_and_streams(library: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(library.GatedDeltaNet(**COMMON, expand_v=1)).eval()
    manifest = linexport.convert(
        net, args=(torch.randn(2, 80, 16),), output=tmp_path / "out", bench=False
    )
    assert manifest.status == "ok"
    assert manifest.fused == {"CausalConvWithState": 1, "LinearAttention": 1}
    assert manifest.streaming is not None
    assert manifest.dims["seq"].min == 1


MASKED = (
    ("DeltaNet", {}),
    ("ForgettingAttention", {}),
    ("GatedDeltaNet", {"expand_v": 1}),
    ("GatedLinearAttention", {}),
    ("KimiDeltaAttention", {}),
    ("LinearAttention", {}),
    ("MultiScaleRetention", {}),
    ("RodimusAttention", {}),
)


@pytest.mark.parametrize("library", ["fla.layers"], indirect=True)
@pytest.mark.parametrize(("name", "given"), MASKED)
def test_padded_rows_of_a_layer_of_fla_are_as_alone(
    library: Any, name: str, given: dict[str, Any]
) -> None:
    layer = layer_of(library, name, given)
    gpu_kernels.install(layer)
    x, mask = torch.randn(3, 80, 64), torch.ones(3, 80, dtype=torch.long)
    mask[0, :13], mask[1, 70:] = 0, 0
    with torch.no_grad():
        found = layer(x, attention_mask=mask)[0]
        for row, valid, y in zip(x, mask.bool(), found, strict=True):
            (expected,) = layer(row[valid][None])[0]
            torch.testing.assert_close(y[valid], expected, rtol=1e-4, atol=1e-5)


MAMBA_2 = (
    {},
    {"rmsnorm": False},
    {"norm_before_gate": True},
    {"D_has_hdim": True},
    {"hidden_act": "relu"},
)


@pytest.mark.parametrize("library", ["fla.layers"], indirect=True)
@pytest.mark.parametrize("given", MAMBA_2)
def test_the_layer_of_mamba_2_equals_its_own_code_with_and_without_a_mask(
    library: Any, given: dict[str, Any]
) -> None:
    layer = layer_of(library, "Mamba2", {"state_size": 16, "num_heads": 4, "n_groups": 1} | given)
    gpu_kernels.install(layer)
    x, mask = torch.randn(3, 40, 64), torch.ones(3, 40, dtype=torch.long)
    mask[0, :13], mask[1, 30:], mask[2, 7:9] = 0, 0, 0
    with torch.no_grad():
        for one in (None, mask):
            expected, *_ = layer.torch_forward(x, attention_mask=one)
            found, *_ = fla_mamba2.torch_forward(layer, x, attention_mask=one)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Masked(nn.Module):
    """A layer that is given a mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.layer(x, attention_mask=attention_mask)[0]


WITH_A_MASK = (
    ("fla.layers.mamba2", "Mamba2", {"state_size": 16, "num_heads": 4, "n_groups": 1}),
    ("fla.layers.rodimus", "SlidingWindowSharedKeyAttention", {"window_size": 16}),
)


@pytest.mark.parametrize(("place", "name", "given"), WITH_A_MASK)
def test_a_masked_layer_converts_and_a_padded_row_is_as_alone(
    place: str, name: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(), absent.standing_in(absent.needed()):
        warnings.simplefilter("ignore")
        module = pytest.importorskip(place, exc_type=ImportError)
    for function, made in gpu_kernels.functions("flash_attn").items():
        monkeypatch.setattr(module, function, made, raising=False)
    layer = layer_of(module, name, given)
    x, mask = torch.randn(2, 40, 64), torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    manifest = linexport.convert(
        Masked(layer).eval(), args=(x, mask), output=tmp_path / "out", bench=False
    )
    assert manifest.status == "ok"
    run = manifest.load().run
    (whole,), (alone,) = (
        run(x[:1, first:].numpy(), mask[:1, first:].numpy()).values() for first in (0, 13)
    )
    assert abs(whole[:, 13:] - alone).max() <= 1e-5 * abs(alone).max()


@pytest.mark.parametrize("library", ["fla.layers"], indirect=True)
def test_a_single_token_that_is_padding_gives_zeros(library: Any) -> None:
    """LightNetAttention does not repad a batch of one row and one token."""
    layer = layer_of(library, "LightNetAttention", {})
    gpu_kernels.install(layer)
    with torch.no_grad():
        found = layer(torch.randn(1, 1, 64), attention_mask=torch.zeros(1, 1, dtype=torch.long))[0]
    assert not found.any()


@pytest.mark.parametrize("library", ["fla.layers"], indirect=True)
def test_padding_is_removed_as_fla_removes_it(library: Any) -> None:
    theirs = importlib.import_module("fla.layers.utils")
    module = importlib.reload(theirs)  # without stand-ins, which other tests have put
    x, mask = torch.randn(3, 9, 4), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4], mask[1, 6:], mask[2, 3:5] = 0, 0, 0
    rows, indices, ends = module.unpad_hidden_states(x, None, mask, 9)
    expected = torch.cat([row.cumsum(0) for row in rows[0].tensor_split(ends[1:-1].long())])
    expected = module.repad_hidden_states(expected[None], indices, 3, 9)
    rows, places, _ = padding.unpad_hidden_states(x, None, mask, 9)
    found = padding.repad_hidden_states(rows.cumsum(1), places, 3, 9)
    torch.testing.assert_close(found, expected)


SECOND = (
    {},
    {"ngroups": 2, "rmsnorm": False},
    {"D_has_hdim": True, "d_ssm": 32},
    {"norm_before_gate": True},
)


@pytest.mark.parametrize("library", ["mamba_ssm"], indirect=True)
@pytest.mark.parametrize("given", SECOND)
def test_layers_of_our_own_take_the_weights_of_mamba_ssm_and_equal_its_layers(
    library: Any, given: dict[str, Any]
) -> None:
    gpu_kernels.install(nn.Identity())
    torch.manual_seed(0)
    x = torch.randn(2, 17, 32)
    for name, options in (("Mamba", {}), ("Mamba2", {"headdim": 16, "d_state": 8, **given})):
        theirs = getattr(library, name)(32, **options).eval()
        ours = getattr(layers, name)(32, **options).eval()
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", ["mamba_ssm"], indirect=True)
@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_a_layer_of_mamba_ssm_converts_and_streams(library: Any, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"headdim": 16, "chunk_size": 32} if name == "Mamba2" else {}
    net = Net(getattr(library, name)(64, d_state=16, **options)).eval()
    manifest = linexport.convert(
        net, args=(torch.randn(2, 64, 16),), output=tmp_path / "out", bench=False
    )
    assert manifest.status == "ok"
    assert manifest.fused == {"CausalConvWithState": 1, "LinearAttention": 1}
    assert manifest.streaming is not None
    assert manifest.kernels
    assert importlib.import_module("selective_scan_cuda")
