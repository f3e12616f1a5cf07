"""Data and scores of the two small models, in the form that ``linexport linearize`` takes them.

linexport linearize digits.pt -o linear.pt --data linexport.models.samples:digits \
    --evaluate linexport.models.samples:accuracy
linexport linearize lm.pt -o linear.pt --data linexport.models.samples:text \
    --evaluate linexport.models.samples:bits_per_byte --lower-is-better
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linexport.models import data, training

IMAGES = 1024
WINDOWS, WINDOW = 512, 256
SCORED = 64 * 1024


def digits() -> Tensor:
    """Images that the classifier is trained on, (N, tokens, features)."""
    train, _ = data.digits()
    return data.patches(train.images[:IMAGES], training.TOKENS)


def accuracy(module: nn.Module) -> float:
    """The share of held-out images that a classifier is right about."""
    _, held_out = data.digits()
    return training.accuracy(module, held_out)


def text() -> Tensor:
    """Windows of the text that the language model is trained on, (N, T)."""
    train = data.library_text().train
    starts = torch.linspace(0, len(train) - WINDOW, WINDOWS).long()
    return train[starts[:, None] + torch.arange(WINDOW)].long()


def bits_per_byte(module: nn.Module) -> float:
    """Of the beginning of the held-out text."""
    return training.bits_per_byte(module, data.library_text().held_out[:SCORED])
