"""The mLSTM, whose exponents have a running maximum subtracted, as xLSTM and others write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    split,
)


@formulation(COLLECTED, nodes=2)
def stabilised_mlstm(q, k, v):
    """xLSTM's parallel form, whose exponents are means of channels: sums inside of exp."""
    forget = F.logsigmoid(split(q).mean(-1) + 2).transpose(1, 2)
    exponent = split(k).mean(-1).transpose(1, 2)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    total = forget.cumsum(-1)
    log_weights = total[..., :, None] - total[..., None, :] + exponent[..., None, :]
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    log_weights = log_weights.masked_fill(later, -torch.inf)
    largest = log_weights.max(-1, keepdim=True).values
    weights = (log_weights - largest).exp()
    scores = q @ k.transpose(-1, -2) * D**-0.5 * weights
    norm = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-largest).exp())
    return merge((scores / (norm + 1e-6)) @ v)


@formulation(COLLECTED, nodes=2)
def mlstm_without_stabiliser(q, k, v):
    """The same without the maximum: exponents bounded by sigmoid."""
    forget = F.logsigmoid(split(q).mean(-1) + 2).transpose(1, 2)
    exponent = F.logsigmoid(split(k).mean(-1)).transpose(1, 2)
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    total = forget.cumsum(-1)
    log_weights = total[..., :, None] - total[..., None, :] + exponent[..., None, :]
    scores = q @ k.transpose(-1, -2) * D**-0.5 * log_weights.tril().exp().tril()
    norm = scores.sum(-1, keepdim=True).abs().clamp(min=1)
    return merge((scores / norm) @ v)


class Cell(nn.Module):
    """The parallel form, with the gates of xLSTM: projections of queries, keys and values."""

    largest = 60

    def __init__(self) -> None:
        super().__init__()
        self.input_gate, self.forget_gate = (nn.Linear(3 * WIDTH, HEADS) for _ in range(2))

    def forward(self, q, k, v):
        packed = torch.cat([q, k, v], -1)
        # Exponents that leave float32, and products of one sign: their sums are not near zero.
        exponent = self.largest * self.input_gate(packed).transpose(1, 2)[..., None]
        forget = F.logsigmoid(4 * self.forget_gate(packed)).transpose(1, 2)[..., None]
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return merge(self.cell(*map(heads_first, (q, k, v)), exponent, forget))

    def logarithms(self, exponent, forget):
        """Logarithms of the weights of keys, (B, H, T, T)."""
        total = forget.cumsum(-2)
        length = forget.shape[2]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (total - total.mT + exponent.mT).masked_fill(later, -torch.inf)

    def cell(self, q, k, v, exponent, forget):
        logarithms = self.logarithms(exponent, forget)
        largest = logarithms.amax(-1, keepdim=True)
        scores = q @ k.mT * D**-0.5 * torch.exp(logarithms - largest)
        return self.normalised(scores, largest) @ v

    def normalised(self, scores, largest):
        return scores / torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-largest))


class StabilisedCell(Cell):
    """As it is in the paper."""


class XlstmParallel(Cell):
    """parallel_stabilized_simple of the package, line by line."""

    def cell(self, queries, keys, values, igate_preact, log_fgates):
        B, NH, S, DH = queries.shape
        ltr = torch.tril(torch.ones((S, S), dtype=torch.bool))
        log_fgates_cumsum = torch.cat(
            [torch.zeros((B, NH, 1, 1), dtype=queries.dtype), torch.cumsum(log_fgates, dim=-2)],
            dim=-2,
        )
        rep_log_fgates_cumsum = log_fgates_cumsum.repeat(1, 1, 1, S + 1)
        _log_fg_matrix = rep_log_fgates_cumsum - rep_log_fgates_cumsum.transpose(-2, -1)
        log_fg_matrix = torch.where(ltr, _log_fg_matrix[:, :, 1:, 1:], -float("inf"))
        log_D_matrix = log_fg_matrix + igate_preact.transpose(-2, -1)
        max_log_D, _ = torch.max(log_D_matrix, dim=-1, keepdim=True)
        log_D_matrix_stabilized = log_D_matrix - max_log_D
        D_matrix = torch.exp(log_D_matrix_stabilized)
        keys_scaled = keys / DH**0.5
        qk_matrix = queries @ keys_scaled.transpose(-2, -1)
        C_matrix = qk_matrix * D_matrix
        normalizer = torch.maximum(C_matrix.sum(dim=-1, keepdim=True).abs(), torch.exp(-max_log_D))
        C_matrix_normalized = C_matrix / (normalizer + 1e-6)
        return C_matrix_normalized @ values


class DividedBehindTheValues(Cell):
    """Numerator and sum apart, by einsum, and eps added."""

    def cell(self, q, k, v, exponent, forget):
        logarithms = self.logarithms(exponent, forget)
        largest = logarithms.max(-1).values
        weights = (logarithms - largest[..., None]).exp()
        scores = torch.einsum("bhtd,bhsd->bhts", q / D**0.5, k) * weights
        top = torch.einsum("bhts,bhse->bhte", scores, v)
        below = scores.sum(-1).abs().maximum(largest.neg().exp()) + 1e-6
        return top / below[..., None]


class OverTheSum(Cell):
    """Over the sum alone, from which the maximum cancels."""

    def normalised(self, scores, largest):
        return scores / scores.sum(-1, keepdim=True)


class WithoutForgetting(Cell):
    """Input gates alone."""

    def logarithms(self, exponent, forget):
        later = torch.ones(forget.shape[2], forget.shape[2], dtype=torch.bool).triu(1)
        return exponent.mT.expand(*exponent.shape[:3], forget.shape[2]).masked_fill(
            later, -torch.inf
        )


for _cell in (StabilisedCell, XlstmParallel, DividedBehindTheValues, WithoutForgetting):
    formulation(COLLECTED, nodes=2)(_cell)
formulation(COLLECTED)(OverTheSum)


class MaximumOfAllTokens(Cell):
    """The largest exponent of later tokens as well, as stabilize_rowwise=False has it."""

    largest = 1

    def cell(self, q, k, v, exponent, forget):
        logarithms = self.logarithms(exponent, forget)
        largest = logarithms.amax((-2, -1), keepdim=True)
        scores = q @ k.mT * D**-0.5 * torch.exp(logarithms - largest)
        return self.normalised(scores, largest) @ v


class MaximumOfOtherExponents(Cell):
    """The maximum leaves out what the weights have."""

    def cell(self, q, k, v, exponent, forget):
        logarithms = self.logarithms(exponent, forget)
        largest = self.logarithms(exponent / 2, forget).amax(-1, keepdim=True)
        scores = q @ k.mT * D**-0.5 * torch.exp(logarithms - largest)
        return self.normalised(scores, largest) @ v


class HalfTheMaximum(Cell):
    """Half of it is subtracted."""

    def cell(self, q, k, v, exponent, forget):
        logarithms = self.logarithms(exponent, forget)
        largest = logarithms.amax(-1, keepdim=True) / 2
        scores = q @ k.mT * D**-0.5 * torch.exp(logarithms - largest)
        return self.normalised(scores, largest) @ v


class StableSoftmax(Cell):
    """Scores are among the exponents."""

    def cell(self, q, k, v, exponent, forget):
        logarithms = q @ k.mT + self.logarithms(exponent, forget)
        weights = (logarithms - logarithms.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True) @ v


for _cell in (MaximumOfAllTokens, MaximumOfOtherExponents, HalfTheMaximum):
    formulation(COLLECTED, reason="subtracted")(_cell)
formulation(COLLECTED, reason="softmax attention")(StableSoftmax)
