"""An encoder and a decoder of transformers, with small random weights, in linear form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.loaders import load_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(1, 64, (12, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).masked_fill(torch.arange(10) >= torch.arange(12)[:, None] % 5 + 6, 0)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=64, initializer_range=0.1,
        )  # fmt: skip
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0,
            eos_token_id=0, initializer_range=0.1,
        )  # fmt: skip
        self.gpt2 = transformers.GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.gpt2(input_ids=input_ids, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize(("make", "args"), [(Encoder, (IDS, MASK)), (Decoder, (IDS,))])
def test_every_layer_is_replaced_and_the_rest_is_the_original(
    make: type[nn.Module], args: tuple[Tensor, ...], tmp_path: Path
) -> None:
    module = make().eval()
    kept = linexport.linearize(module, args, map={"*": "taylor2", "*1*": "keep"}, bench=False)
    first, second = kept.report["layers"]
    assert first["map"] == "taylor2" and second["map"] is None
    assert first["causal"] is (make is Decoder) and first["masked"] is (make is Encoder)
    assert first["projection"] is not None and 0 < first["layer_error"] < 1
    own = {id(x) for x in module.parameters()}
    assert sum(id(x) not in own for x in kept.module.parameters()) == 1
    assert 0 < kept.report["output_error"] < 0.5
    kept.save(tmp_path / "linear.pt2")
    with torch.no_grad():
        got = load_model(tmp_path / "linear.pt2").module(*args)
        torch.testing.assert_close(got, kept.module(*args), atol=1e-5, rtol=1e-4)
