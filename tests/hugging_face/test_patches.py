"""Swapping functions of a library: only while tracing, only the ones that are known."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.patches import experts, softmax_attention
from linexport.patches.state_cache import StateCache, active, using_states
from linexport.sources import load_model
from tests.support.families import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def library() -> ModuleType:
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def test_functions_are_restored_whatever_happens(library: ModuleType) -> None:
    before = dict(vars(library))
    with pytest.raises(RuntimeError, match="on the way"), patches.applied([library]):
        assert library.causal_conv1d_fn is not before["causal_conv1d_fn"]
        raise RuntimeError("on the way")
    assert vars(library) == before


def test_an_unknown_parameter_stops_the_conversion(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]
) -> None:
    def causal_conv1d_fn(
        hidden_states: Any, weight: Any, stride: int, bias: Any = None, **kwargs: Any
    ) -> None:
        raise AssertionError

    monkeypatch.setattr(library, "causal_conv1d_fn", causal_conv1d_fn)
    with pytest.raises(UnsupportedModelError, match=r"'stride'.*transformers 5") as info:
        load_model(model_folder("qwen3_5_text"))
    assert "causal_conv1d_fn" in str(info.value)
    assert library.causal_conv1d_fn is causal_conv1d_fn


@pytest.mark.parametrize(
    ("module", "what"), [("gated_delta", "recurrent state"), ("causal_conv", "convolution")]
)
def test_a_layer_that_no_patch_stands_in_for_is_traced_as_it_is(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path], module: str, what: str
) -> None:
    """As when a new release has written the function anew: its states cannot be read."""
    kept = tuple(p for p in patches.patches() if module not in p.swaps[0].replacement.__module__)
    monkeypatch.setattr(patches, "patches", lambda: kept)
    loaded = load_model(model_folder("qwen3_5_text"))
    assert loaded.decode_module is None and loaded.outputs == ("logits",)
    assert f"{what} of layer 0" in loaded.unread and "transformers 5" in loaded.unread
    assert loaded.unread in loaded.warnings


def test_every_patch_names_functions_and_families() -> None:
    found = patches.patches()
    assert found
    for patch in found:
        assert patch.swaps and patch.families and patch.tried.package == "transformers"


def test_states_are_those_of_the_run_they_belong_to() -> None:
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    first = StateCache({})
    with using_states(first):
        first.begin_convolution("0")
        whole = active().convolve(x, weight, None, None)
    second = StateCache({})
    with using_states(second):
        second.begin_convolution("0")
        head = active().convolve(x[..., :2], weight, None, None)
    third = StateCache(second.present)
    with using_states(third):
        third.begin_convolution("0")
        tail = active().convolve(x[..., 2:], weight, None, None)
    torch.testing.assert_close(torch.cat([head, tail], -1), whole)
    torch.testing.assert_close(third.present["conv_0"], first.present["conv_0"])
    torch.testing.assert_close(first.present["conv_0"], x[..., -2:])


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu2", "linear"])
def test_convolutions_have_any_activation_of_the_library(
    library: ModuleType, activation: str
) -> None:
    x, weight = torch.randn(2, 4, 9), torch.randn(4, 3)
    found = StateCache({}).convolve(x, weight, None, activation)
    expected = library.causal_conv1d_fn.__wrapped__(x, weight, activation=activation)
    torch.testing.assert_close(found, expected)


def test_an_activation_that_the_library_has_not_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'nonsense'.*gelu_pytorch_tanh"):
        StateCache({}).convolve(torch.randn(1, 2, 3), torch.randn(2, 2), None, "nonsense")


def test_the_original_calls_no_compiled_kernels(library: ModuleType) -> None:
    before = dict(vars(library))
    assert hasattr(library.causal_conv1d_update, "__wrapped__")
    with patches.original([library]):
        for name in ("causal_conv1d_update", "causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
            assert getattr(library, name) is before[name].__wrapped__
    assert vars(library) == before


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_the_library_s(library: ModuleType, groups: int) -> None:
    query = torch.randn(2, 4, 5, 8)
    key, value = torch.randn(2, 2, 4 // groups, 7, 8)
    mask = torch.randn(2, 1, 5, 7)
    module = SimpleNamespace(num_key_value_groups=groups, training=False)
    for given in (mask, None):
        expected = library.eager_attention_forward(module, query, key, value, given, 0.3)
        found = softmax_attention.eager_attention_forward(module, query, key, value, given, 0.3)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_with_a_bias_of_every_head_is_the_library_s(groups: int) -> None:
    """Heads that share keys are not copied together for it."""
    from torch.profiler import profile
    from transformers.models.inkling import modeling_inkling as inkling

    query = torch.randn(2, 4, 5, 8)
    key, value = torch.randn(2, 2, 4 // groups, 7, 8)
    mask, bias = torch.randn(2, 1, 5, 7), torch.randn(2, 4, 5, 7)
    module = SimpleNamespace(num_key_value_groups=groups, training=False)
    for given in (mask, None):
        arguments = (module, query, key, value, given, 0.3)
        expected = inkling.eager_attention_forward(*arguments, position_bias=bias)
        with profile() as run:
            found = softmax_attention.eager_attention_forward(*arguments, position_bias=bias)
        torch.testing.assert_close(found, expected)
        assert "aten::cat" not in {event.key for event in run.key_averages()}


@pytest.mark.parametrize("kind", ["kimi_linear", "kimi_linear, query ranks", "bailing_hybrid"])
def test_latent_attention_is_the_library_s(kind: str) -> None:
    """Absorbed here, expanded there; both from the latents of a past."""
    from transformers import BailingHybridConfig, DynamicCache, KimiLinearConfig
    from transformers.models.bailing_hybrid import modeling_bailing_hybrid as bailing
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    torch.manual_seed(0)
    if kind == "bailing_hybrid":
        config: Any = BailingHybridConfig(**TINY[kind], attn_implementation="eager")
        library, own = bailing, bailing.BailingHybridAttention
        angles = torch.randn(2, 9, config.qk_rope_head_dim // 2).repeat(1, 1, 2)
        turns = zip(angles.cos().split([6, 3], 1), angles.sin().split([6, 3], 1), strict=True)
    else:
        rank = 12 if "ranks" in kind else None
        config = KimiLinearConfig(
            **TINY["kimi_linear"], q_lora_rank=rank, attn_implementation="eager"
        )
        library, own = kimi, kimi.KimiLinearAttention
        turns = None
    layer = own(config, 1).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    pieces = torch.randn(2, 9, config.hidden_size).split([6, 3], 1)
    masks = [torch.randn(2, 1, 6, 6), torch.randn(2, 1, 3, 9)]
    places = [(), ()] if turns is None else [(turn,) for turn in turns]

    def run() -> list[torch.Tensor]:
        past = DynamicCache(config=config)
        with torch.no_grad():
            calls = zip(pieces, places, masks, strict=True)
            return [layer(x, *place, mask, past)[0] for x, place, mask in calls]

    expected = run()
    forward = own.forward
    with patches.applied([library]):
        assert own.forward is not forward
        torch.testing.assert_close(run(), expected)


def test_the_mask_is_the_library_s(library: ModuleType) -> None:
    """For rows that have a token to attend to: of the others nobody reads the output."""
    from transformers import DynamicCache, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["full_attention"])
    config._attn_implementation = "eager"
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    for length in (7, 3, 1):
        past = DynamicCache(config=config)
        if length < 7:
            past.update(*torch.zeros(2, 3, 1, 7 - length, 4), 0)
        embeds = torch.zeros(3, length, 4)
        expected = library.create_causal_mask(config, embeds, padding, past)
        found = softmax_attention.create_causal_mask(config, embeds, padding, past)
        sees = (expected == 0).any(-1, keepdim=True).expand_as(expected)
        torch.testing.assert_close(found[sees], expected[sees])


def test_a_mask_of_another_kind_is_refused() -> None:
    tokens = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match="not just causal"):
        softmax_attention.create_causal_mask(
            SimpleNamespace(), torch.zeros(1, 3, 4), tokens, None, or_mask_function=max
        )


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_experts_are_computed_by_the_op(model_type: str) -> None:
    """Otherwise weights of the chosen experts are gathered for every token: ten times slower."""
    import transformers

    configuration = transformers.AutoConfig.for_model(model_type, **TINY[model_type])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(configuration)
    found = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    assert all(map(experts.described, found))
