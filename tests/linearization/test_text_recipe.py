"""``tools/train_text.py``: the rows that a decoder is trained on, and training that goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
recipe = pytest.importorskip("train_text")

pytestmark = pytest.mark.usefixtures("one_thread")

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def corpus() -> Any:
    text = (TOOLS / "train_text.py").read_text(encoding="utf-8")
    tokenizer = recipe.train_tokenizer([text])
    tokens = torch.tensor(tokenizer.encode(text).ids * 4, dtype=torch.int32)
    return recipe.Corpus(tokenizer, tokens, tokens)


def test_an_answer_is_all_that_a_lookup_teaches_and_is_told_before(
    corpus: Any,
) -> None:
    rows = recipe.Rows(corpus, False, 0)
    for _ in range(20):
        tokens, labels, positions = rows.lookups(640)
        assert len(tokens) == len(labels) == len(positions) == 640
        known = labels != recipe.IGNORED
        assert torch.equal(labels[known], tokens[known])
        assert int(positions.max()) < recipe.REACH and int(positions.diff().min()) == 1
        text = corpus.tokenizer.decode(tokens.tolist())
        told = dict(re.findall(r"\nremember ([a-z]{4}) = (\d{4})\n", text))
        found = re.findall(r"\nrecall ([a-z]{4}) = (\d{4})", text)
        assert found and all(told[name] == number for name, number in found)
        hidden = corpus.tokenizer.decode(tokens[~known].tolist())
        assert len(re.findall(r"\nrecall [a-z]{4} = (?!\d)", hidden)) == len(found)


def test_a_needle_ends_with_its_answer(corpus: Any) -> None:
    row = recipe.Rows(corpus, True, 1).needle(300)
    text = corpus.tokenizer.decode(row.tolist())
    found = re.search(r"\nremember ([a-z]{4}) = (\d{4})\n", text)
    assert len(row) == 300 and found is not None
    assert text.endswith(f"\nrecall {found[1]} = {found[2]}")


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(32, (2, 12), generator=generator) for _ in range(4)]
    whole, first = small(), small()
    learn(whole, batches)
    learn(first, batches[:2])
    first.save(tmp_path)
    second = small()
    second.load(tmp_path)
    learn(second, batches[2:])
    assert second.step == 4 and second.tokens == 4 * 24
    for one, other in zip(whole.average, second.average, strict=True):
        assert torch.equal(one, other) and not one.requires_grad and not other.requires_grad
    learn(first, batches[2:])  # saving averages leaves the weights as they were
    for one, other in zip(whole.average, first.average, strict=True):
        assert torch.equal(one, other)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in saved.parameters()) == sum(p.numel() for p in whole.average)


def small() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = transformers.Qwen3Config(vocab_size=32, **sizes, **heads)
    return recipe.Training(transformers.Qwen3ForCausalLM(config))


def learn(training: Any, batches: list[Tensor]) -> None:
    for tokens in batches:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        training.learn((tokens, tokens, positions), 1e-3)
