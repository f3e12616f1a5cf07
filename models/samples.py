"""Data and scores of the small models, in the form that ``linexport linearize`` takes them.

linexport linearize digits.pt -o linear.pt --data linexport.models.samples:digits \
    --evaluate linexport.models.samples:accuracy
linexport linearize lm.pt -o linear.pt --data linexport.models.samples:text \
    --evaluate linexport.models.samples:bits_per_byte --lower-is-better
linexport linearize network.pt -o linear.pt2 --data linexport.models.samples:brightness \
    --evaluate linexport.models.samples:network_accuracy --feed-forward least-squares
linexport linearize memory.pt -o linear.pt2 --data linexport.models.samples:questions \
    --evaluate linexport.models.samples:memory_accuracy
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linexport.models import data, scores

IMAGES = 1024
WINDOWS, WINDOW = 512, 256
SCORED = 64 * 1024
PARTS = 64
AT_ONCE = 16


def digits() -> Tensor:
    """Images that the classifier is trained on, (N, tokens, features)."""
    train, _ = data.digits()
    return data.patches(train.images[:IMAGES], scores.TOKENS)


def accuracy(module: nn.Module) -> float:
    """The share of held-out images that a classifier is right about."""
    _, held_out = data.digits()
    return scores.accuracy(module, held_out)


def text() -> Tensor:
    """Windows of the text that the language model is trained on, (N, T)."""
    train = data.library_text().train
    starts = torch.linspace(0, len(train) - WINDOW, WINDOWS).long()
    return train[starts[:, None] + torch.arange(WINDOW)].long()


def bits_per_byte(module: nn.Module) -> float:
    """Bits per byte of the beginning of the held-out text."""
    return scores.bits_per_byte(module, data.library_text().held_out[:SCORED])


def brightness() -> Tensor:
    """Images that the network of two layers is trained on, (N, 64)."""
    train, _ = data.digits()
    return data.means(train.images, PARTS)


def network_accuracy(module: nn.Module) -> float:
    """The share of held-out images that such a network is right about."""
    _, held_out = data.digits()
    return scores.share_right(module, data.means(held_out.images, PARTS), held_out)


def questions() -> Tensor:
    """Images that the memory is trained to tell, (N, 16, 64)."""
    _, queried = data.remembered()
    count = len(queried.images) // AT_ONCE
    order = torch.randperm(len(queried.images), generator=torch.Generator().manual_seed(0))
    return queried.images.flatten(1)[order[: count * AT_ONCE]].unflatten(0, (count, AT_ONCE))


def memory_accuracy(module: nn.Module) -> float:
    """The share of held-out images that it is right about."""
    _, held_out = data.digits()
    return scores.share_right(module, held_out.images.flatten(1)[:, None], held_out)
