"""Training of the small models, and their scores on data they never saw.

The same seed and steps give the same weights on the same machine, with the same number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models import data, feature_maps
from linexport.models.classifier import DigitClassifier, DigitClassifierConfig
from linexport.models.digit_memory import DigitMemory, DigitMemoryConfig
from linexport.models.digit_network import DigitNetwork, DigitNetworkConfig
from linexport.models.language_model import LanguageModel, LanguageModelConfig
from linexport.models.scores import IMAGE_BATCH, TOKENS, next_byte_loss

LANGUAGE_MODEL_STEPS = 3000
LANGUAGE_MODEL_HEADS = 6
DIGITS_STEPS = 800
DIGITS_HEADS = 4
MEMORY_STEPS = 800


_LENGTH = 128
_TEXT_BATCH = 4
_SECONDS_BETWEEN_LINES = 2.0
_SCORED = (".query.weight", ".key.weight")

SOFTMAX_DECAY = 16.0
"""Weight decay of queries and keys under softmax: scores that stay small are what a linear form can
follow, and the digits are learned no worse."""

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class TrainingPlan:
    """Steps and learning rates: linear warm-up, then a cosine down to a twentieth.

    Attributes:
        steps: of the optimiser.
        rate: learning rate after the warm-up.
        seconds: stop by then, the cosine shortened to fit; None: take all the steps.
    """

    steps: int
    rate: float
    seconds: float | None = None

    def done(self, step: int, elapsed: float) -> float:
        """The fraction of the plan that lies behind."""
        return max(step / self.steps, elapsed / self.seconds if self.seconds else 0.0)

    def rate_at(self, step: int, done: float) -> float:
        """Learning rate of one step."""
        warm = min(1.0, (step + 1) / (0.05 * self.steps))
        return self.rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


def train_on_batches(
    model: nn.Module,
    loss_of_batch: Callable[[], Tensor],
    plan: TrainingPlan,
    say: Callable[[str], None],
    groups: list[dict[str, object]] | None = None,
) -> None:
    """AdamW on one drawn batch after another, with a line to ``say`` every two seconds.

    ``groups`` are its parameter groups, where they differ in more than the parameters.
    """
    optimizer = torch.optim.AdamW(
        groups or model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    started = shown = time.monotonic()
    model.train()
    for step in range(plan.steps):
        elapsed = time.monotonic() - started
        done = plan.done(step, elapsed)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step, done)
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = time.monotonic()
        if now - shown >= _SECONDS_BETWEEN_LINES or step in (0, plan.steps - 1):
            shown = now
            left = f", about {elapsed * (1 - done) / done:.0f} s left" if done else ""
            spent = f"{now - started:.0f} s{left}"
            say(f"step {step + 1}/{plan.steps}  loss {loss.item():.3f}  {spent}")
    model.eval()


def train_language_model(
    steps: int = LANGUAGE_MODEL_STEPS,
    *,
    seed: int = 0,
    feature_map: str = "elu1",
    options: Mapping[str, Any] | None = None,
    heads: int = LANGUAGE_MODEL_HEADS,
    attention: str = "linear",
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> LanguageModel:
    """A language model of the standard library's source text, 96 wide.

    Raises:
        UsageError: unknown feature map, options it does not have or cannot take, or ``heads`` that
            do not divide the width.
        EnvironmentProblemError: this interpreter comes without its source.
    """
    config = LanguageModelConfig(
        dim=96,
        num_heads=heads,
        layers=2,
        feature_map=feature_map,
        feature_map_options=dict(options) if options else None,
        normalize=feature_maps.find_map(feature_map).kernel_positive,
        attention=attention,
    )
    text = data.library_text().train
    model = _seeded(seed, lambda: LanguageModel(config))
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(_LENGTH + 1)

    def loss_of_batch() -> Tensor:
        starts = torch.randint(len(text) - _LENGTH, (_TEXT_BATCH, 1), generator=generator)
        return next_byte_loss(model, text[starts + window], "mean")

    train_on_batches(model, loss_of_batch, TrainingPlan(steps, 8e-3, seconds), say)
    return model


def _loss_of_drawn(
    logits: Callable[[Tensor], Tensor], pixels: Tensor, labels: Tensor, seed: int
) -> Callable[[], Tensor]:
    """The loss of another drawn batch of images at every call."""
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        chosen = torch.randint(len(pixels), (IMAGE_BATCH,), generator=generator)
        return F.cross_entropy(logits(pixels[chosen]), labels[chosen])

    return loss


def train_digits(
    steps: int = DIGITS_STEPS,
    *,
    seed: int = 0,
    feature_map: str = "elu1",
    options: Mapping[str, Any] | None = None,
    heads: int = DIGITS_HEADS,
    attention: str = "linear",
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DigitClassifier:
    """A classifier of scikit-learn's digits, cut into patches of four pixels, 64 wide.

    Raises:
        UsageError: unknown feature map, options it does not have or cannot take, or ``heads`` that
            do not divide the width.
        EnvironmentProblemError: scikit-learn is not installed.
    """
    config = DigitClassifierConfig(
        dim=64,
        num_heads=heads,
        layers=2,
        hidden_dim=128,
        tokens=TOKENS,
        feature_map=feature_map,
        feature_map_options=dict(options) if options else None,
        normalize=feature_maps.find_map(feature_map).kernel_positive,
        attention=attention,
    )
    train, _ = data.digits()
    pixels = data.patches(train.images, config.tokens)
    model = _seeded(seed, lambda: DigitClassifier(config))
    loss_of_batch = _loss_of_drawn(model, pixels, train.labels, seed)

    groups: list[dict[str, object]] | None = None
    if attention == "softmax":
        scored = {n: p for n, p in model.named_parameters() if n.endswith(_SCORED)}
        rest = [p for n, p in model.named_parameters() if n not in scored]
        groups = [
            {"params": rest},
            {"params": [*scored.values()], "weight_decay": SOFTMAX_DECAY},
        ]
    train_on_batches(model, loss_of_batch, TrainingPlan(steps, 3e-3, seconds), say, groups)
    return model


def train_digit_network(
    steps: int = DIGITS_STEPS,
    *,
    seed: int = 0,
    parts: int = 64,
    hidden_dim: int = 32,
    decay: float = 0.1,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DigitNetwork:
    """Two layers on scikit-learn's digits, given as the mean brightness of their parts.

    A large weight ``decay`` of the first layer keeps what the activation is given small.

    Raises:
        EnvironmentProblemError: scikit-learn is not installed.
    """
    train, _ = data.digits()
    pixels = data.means(train.images, parts)
    model = _seeded(
        seed, lambda: DigitNetwork(DigitNetworkConfig(features=parts, hidden_dim=hidden_dim))
    )
    loss_of_batch = _loss_of_drawn(model, pixels, train.labels, seed)

    groups = [
        {"params": [*model.hidden.parameters()], "weight_decay": decay},
        {"params": [*model.classes.parameters()], "weight_decay": 0.0},
    ]
    train_on_batches(model, loss_of_batch, TrainingPlan(steps, 5e-3, seconds), say, groups)
    return model


def train_digit_memory(
    steps: int = MEMORY_STEPS,
    *,
    seed: int = 0,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> DigitMemory:
    """A memory of 4,096 images of digits, learned by looking up images that are not in it.

    Raises:
        EnvironmentProblemError: scikit-learn is not installed.
    """
    stored, queried = data.remembered()
    rows, queries = stored.images.flatten(1), queried.images.flatten(1)
    model = _seeded(seed, lambda: DigitMemory(DigitMemoryConfig(rows=len(rows))))

    def logits(images: Tensor) -> Tensor:
        return model.look_up(images[None], *model.memory(rows, stored.labels))[0]

    loss_of_batch = _loss_of_drawn(logits, queries, queried.labels, seed)
    # Decay would keep the scores so small that every image looks like all others.
    groups = [{"params": [*model.parameters()], "weight_decay": 0.0}]
    train_on_batches(model, loss_of_batch, TrainingPlan(steps, 3e-2, seconds), say, groups)
    model.store(rows, stored.labels)
    return model


def _seeded(seed: int, make: Callable[[], M]) -> M:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
