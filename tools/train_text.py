"""Train a language model on text that packages carry, with lookups mixed in.

    python tools/train_text.py FOLDER [--steps 20000]

FOLDER takes the tokenizer, the tokens, a checkpoint every few minutes and, in ``FOLDER/model``, a
transformers folder with averaged weights. Run again, it goes on from the checkpoint. One thread.

The model is a qwen3 of 23 M parameters: eight layers of width 512, eight heads, two of keys and
values, 4,096 tokens of byte-level BPE. The text is Python sources and documents of the interpreter
and of installed packages; one package in sixteen is held out. A third of the rows are lookups:
lines such as ``remember zkqf = 4821`` between lines of text, and questions at the end. Such rows
have a jump in their positions, so that distances up to ``REACH`` occur in rows of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import random
import site
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 4096
CONTEXT = 2048
REACH = 8192
"""Distance between a question and its answer, in positions, at most."""

SHORT, SHORT_STEPS = 512, 800
"""Tokens of a row at first, and for how many steps."""

BATCH_TOKENS = 2048
LOOKUPS = 1 / 3
"""Share of the rows."""

PAIRS, PAIR_TOKENS = (1, 2, 4, 8, 16), 32
"""Names to look up in a row, and tokens of a fact and its question, at most."""

RATE, WARM_UP, DECAY_FROM = 2e-3, 100, 1500
"""Learning rate; it rises over so many steps and falls with the square root of the step."""

AVERAGE = 0.995
"""Weight of the earlier average of weights at every step."""

SAVE_SECONDS = 180.0

PACKAGE_BYTES = 1 << 20
"""Text of one package at most: no package should be most of the text."""

HELD_OUT = 16
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
IGNORED = -100


# Text


def packages() -> Iterator[tuple[str, list[Path]]]:
    """Yield names of modules and packages, and their files."""
    roots = (sysconfig.get_path("stdlib"), *site.getsitepackages())
    tops = [top for root in dict.fromkeys(roots) for top in sorted(Path(root).iterdir())]
    for top in tops:
        if (
            top.name in ("site-packages", "__pycache__", "test", "idlelib")
            or "linexport" in top.name
        ):
            continue
        files = [top] if top.is_file() else sorted(top.rglob("*"))
        kept = [file for file in files if file.suffix in SUFFIXES and file.is_file()]
        if kept:
            yield top.name, kept


def documents(held_out: bool) -> Iterator[str]:
    """Yield the text of files, package by package."""
    for name, files in packages():
        digest = hashlib.sha256(name.encode()).digest()
        if (digest[0] % HELD_OUT == 0) != held_out:
            continue
        random.Random(0).shuffle(files)
        left = PACKAGE_BYTES
        for file in files:
            text = file.read_bytes()[:left].decode(errors="ignore")
            left -= len(text.encode())
            if text:
                yield text


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Tokens of the text, and how they are read.

    Attributes:
        tokenizer: of the model.
        train: tokens, uint16; documents end with token 0.
        held_out: tokens of packages that training never reads.
    """

    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor

    def bytes_of(self, tokens: Tensor) -> int:
        """Return the length of the text of tokens, without ends of documents."""
        return len(self.tokenizer.decode(tokens.tolist()).encode())


def corpus(folder: Path) -> Corpus:
    """Return the corpus of a folder; it is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if not path.exists():
        sample = (text for at, text in enumerate(documents(False)) if at % 4 == 0)
        train_tokenizer(sample).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    parts = []
    for name in ("train", "held_out"):
        file = folder / f"{name}.npy"
        if not file.exists():
            encoded = ([*tokenizer.encode(t).ids, 0] for t in documents(name == "held_out"))
            tokens = numpy.fromiter(itertools.chain.from_iterable(encoded), numpy.uint16)
            numpy.save(file, tokens)
        parts.append(torch.from_numpy(numpy.load(file)))
    return Corpus(tokenizer, *parts)


# Rows


class Rows:
    """Batches of text and lookups.

    Args:
        found: the corpus.
        held_out: take its held-out tokens.
        seed: of what is drawn.
    """

    def __init__(self, found: Corpus, held_out: bool, seed: int) -> None:
        self.tokenizer = found.tokenizer
        self.tokens = found.held_out if held_out else found.train
        self.random = random.Random(seed)

    def text(self, length: int) -> Tensor:
        """Return a row of text, (length,) int64."""
        start = self.random.randrange(len(self.tokens) - length)
        return self.tokens[start : start + length].long()

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, int64."""
        return torch.tensor(self.tokenizer.encode(text).ids)

    def pairs(self, count: int) -> list[tuple[str, str]]:
        """Return names and numbers to look up."""
        names = ["".join(self.random.choices(LETTERS, k=4)) for _ in range(count)]
        return [(name, f"{self.random.randrange(10000):04}") for name in names]

    def lookups(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, labels and positions of a row, (length,) int64 each.

        Names and numbers that cannot be known have no label.
        """
        pairs = self.pairs(self.random.choice([n for n in PAIRS if PAIR_TOKENS * n <= length]))
        facts = [self.encode(f"\nremember {name} = {number}\n") for name, number in pairs]
        asked = self.random.sample(pairs, len(pairs))
        questions = [self.question(name, number) for name, number in asked]
        spare = length - sum(map(len, facts)) - sum(len(q) for q, _ in questions)
        filler = self.text(int(spare * self.random.choice((0, 0.1, 0.3, 1))))
        cuts = sorted(self.random.randrange(len(filler) + 1) for _ in facts)
        parts = [(filler[: cuts[0]], filler[: cuts[0]])]
        for fact, (cut, end) in zip(facts, itertools.pairwise([*cuts, len(filler)]), strict=True):
            parts += [(fact, torch.full_like(fact, IGNORED)), (filler[cut:end], filler[cut:end])]
        parts += questions
        rest = self.text(length - sum(len(tokens) for tokens, _ in parts))
        parts.append((rest, rest))
        tokens, labels = (torch.cat(ones) for ones in zip(*parts, strict=True))
        jump = self.random.choice((0, self.random.randrange(REACH - length + 1)))
        positions = torch.arange(length)
        positions[self.random.randrange(length) :] += jump
        return tokens, labels, positions

    def question(self, name: str, number: str) -> tuple[Tensor, Tensor]:
        """Return a question with its answer, and labels of the answer alone."""
        tokens, answer = self.encode(f"\nrecall {name} = {number}"), len(number)
        labels = torch.full_like(tokens, IGNORED)
        labels[-answer:] = tokens[-answer:]
        return tokens, labels

    def needle(self, length: int) -> Tensor:
        """Return a row of text with one fact at a random place and its question at the end."""
        ((name, number),) = self.pairs(1)
        fact, (question, _) = (
            self.encode(f"\nremember {name} = {number}\n"),
            self.question(name, number),
        )
        filler = self.text(length - len(fact) - len(question))
        cut = self.random.randrange(len(filler) + 1)
        return torch.cat([filler[:cut], fact, filler[cut:], question])

    def batch(self, length: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, labels and positions, (count, length) int64 each."""
        rows = []
        for _ in range(count):
            if self.random.random() < LOOKUPS:
                rows.append(self.lookups(length))
            else:
                tokens = self.text(length)
                rows.append((tokens, tokens, torch.arange(length)))
        tokens, labels, positions = (torch.stack(ones) for ones in zip(*rows, strict=True))
        return tokens, labels, positions


# Training

Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens, labels and positions, (rows, length) int64 each."""


def rate_at(step: int) -> float:
    """Return the learning rate of a step."""
    return RATE * min(1, (step + 1) / WARM_UP, math.sqrt(DECAY_FROM / (step + 1)))


def build() -> nn.Module:
    """Return the model, not trained yet."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1280,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.Qwen3ForCausalLM(config)


class Training:
    """Weights, their average and two optimizers: Muon for matrices, AdamW for the others."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.step, self.tokens, self.seconds = model, 0, 0, 0.0
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in named if p.dim() != 2 or "embed" in name]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.average = [p.detach().clone() for p in model.parameters()]

    def learn(self, batch: Batch, rate: float) -> float:
        """Take a step on tokens, labels and positions with a learning rate; return the loss."""
        begun, (tokens, labels, positions) = time.process_time(), batch
        with torch.autocast("cpu", torch.bfloat16):
            # A mask, without which transformers takes a jump for the begin of another sequence.
            mask = torch.ones_like(tokens)
            logits = self.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions
            ).logits
        loss = F.cross_entropy(logits[:, :-1].float().mT, labels[:, 1:], ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step, self.tokens = self.step + 1, self.tokens + tokens.numel()
        kept = min(AVERAGE, self.step / (self.step + 10))
        with torch.no_grad():
            for average, weight in zip(self.average, self.model.parameters(), strict=True):
                average.lerp_(weight, 1 - kept)
        self.seconds += time.process_time() - begun
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        """Write the checkpoint, and the model with averaged weights."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, folder / "checkpoint.tmp")
        (folder / "checkpoint.tmp").replace(folder / "checkpoint.pt")
        learned = [p.detach().clone() for p in self.model.parameters()]
        self.set(self.average)
        self.model.save_pretrained(folder / "model")
        self.set(learned)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.average = [weight.detach() for weight in state["average"]]
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)

    @torch.no_grad()
    def set(self, weights: Sequence[Tensor]) -> None:
        """Put weights in the place of the model's."""
        for parameter, weight in zip(self.model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def train(folder: Path, steps: int) -> None:
    """Train up to so many steps, from the folder's checkpoint on."""
    found, training = corpus(folder), Training(build())
    if (folder / "checkpoint.pt").exists():
        training.load(folder)
    rows, saved, mean = Rows(found, False, training.step), time.process_time(), 0.0
    print(f"{len(found.train):,} tokens to train on, {len(found.held_out):,} held out", flush=True)
    while training.step < steps:
        length = SHORT if training.step < SHORT_STEPS else CONTEXT
        batch = rows.batch(length, BATCH_TOKENS // length)
        loss = training.learn(batch, rate_at(training.step))
        mean = loss if not mean else 0.95 * mean + 0.05 * loss
        if training.step % 10 == 0:
            print(
                f"step {training.step}, {training.tokens:,} tokens, loss {mean:.3f}, "
                f"{training.seconds:.0f} s of processor",
                flush=True,
            )
        if time.process_time() - saved > SAVE_SECONDS or training.step == steps:
            training.save(folder)
            saved = time.process_time()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20000)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train(chosen.folder, chosen.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
