"""Scores of the small models on held-out data: bits per byte, and accuracy on digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models import data
from linexport.models.language_model import VOCABULARY

TOKENS = 16
"""Patches that images of digits are cut into."""


# Eight times the length trained on: the score covers what the state carries further than that.
SCORED_LENGTH = 1024


IMAGE_BATCH = 64


@torch.inference_mode()
def bits_per_byte(model: nn.Module, text: Tensor) -> float:
    """Bits per byte, over all but the first byte of each window of a text, (N,) uint8."""
    count = len(text) // SCORED_LENGTH
    windows = text[: count * SCORED_LENGTH].view(count, SCORED_LENGTH)
    total = sum(next_byte_loss(model, part, "sum").item() for part in windows.split(8))
    return total / (count * (SCORED_LENGTH - 1) * math.log(2))


def unigram_bits_per_byte(text: data.Text) -> float:
    """The held-out text coded by how often each byte occurs in the training text, plus one."""
    train, held_out = (torch.bincount(t.long(), minlength=VOCABULARY).double() for t in text)
    frequency = (train + 1) / (train + 1).sum()
    return float(-(held_out * frequency.log2()).sum() / held_out.sum())


@torch.inference_mode()
def accuracy(model: nn.Module, held_out: data.Digits, tokens: int = TOKENS) -> float:
    """The fraction of images, cut into so many patches, whose digit gets the largest logit."""
    return share_right(model, data.patches(held_out.images, tokens), held_out)


@torch.inference_mode()
def share_right(model: nn.Module, pixels: Tensor, held_out: data.Digits) -> float:
    """The fraction of images, one a row of ``pixels``, whose digit gets the largest logit."""
    right = model(pixels).argmax(-1).flatten() == held_out.labels
    return right.double().mean().item()


def next_byte_loss(model: nn.Module, window: Tensor, reduction: str) -> Tensor:
    """Cross entropy of every byte after the first, given those before it."""
    tokens = window.long()
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)
