"""A small tokenizer, as checkpoints of the hub have one."""

from __future__ import annotations

from pathlib import Path

import tokenizers


def save_tokenizer(folder: Path, vocabulary: int, special: tuple[str, ...] = ()) -> None:
    """Write a byte-level ``tokenizer.json``; special tokens have the first ids."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*special],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the théorème of the day"] * 20, trainer)
    made.save(str(folder / "tokenizer.json"))


def save_spaced_tokenizer(folder: Path, vocabulary: int, special: tuple[str, ...]) -> None:
    """Write a tokenizer of words that begin with their space, as those of sentencepiece do."""
    words = {name: i for i, name in enumerate(special)}
    words |= {f"\N{LOWER ONE EIGHTH BLOCK}w{i}": i for i in range(len(words), vocabulary)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=special[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    made.save(str(folder / "tokenizer.json"))
