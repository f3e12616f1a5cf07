"""Factories as a user writes them: each returns (module, args[, dynamic_shapes])."""

import torch
from torch import nn
from torch.export import Dim

from linexport import models
from linexport.models.functional import linear_attention, mixture_of_experts


def attend(x, *past, **attributes):
    settings = {"q_num_heads": 2, "kv_num_heads": 2, "normalize": True, "eps": 1e-6, **attributes}
    return linear_attention(x.relu(), x.relu(), x, *past, **settings)


class Attend(nn.Module):
    def forward(self, x):
        return attend(x)[0]


def small():
    return Attend(), (torch.randn(2, 16, 8),)


class MixHeads(nn.Module):
    """Einsums of what attention returns: of its heads, or of the whole."""

    def __init__(self, heads):
        super().__init__()
        self.heads, shape = heads, (heads, 8 // heads, 8 // heads)
        self.weight = nn.Parameter(torch.randn(shape) / 3)

    def forward(self, x):
        y = attend(x)[0]
        if self.heads == 1:
            return torch.einsum("bti,ij->btj", y, self.weight[0])
        return torch.einsum(
            "bthi,hij->bthj", y.unflatten(2, (self.heads, -1)), self.weight
        ).flatten(2)


def mixed_heads():
    return MixHeads(2), (torch.randn(2, 16, 8),)


def mixed_features():
    return MixHeads(1), (torch.randn(2, 16, 8),)


def example():
    return models.build("language_model", LM), (torch.randint(256, (2, 16)),)


LM = {"dim": 32, "num_heads": 4, "layers": 2}


def language_model():
    model = models.build("language_model", LM)
    return model, model.example_inputs(2, 16, 0), model.dynamic_shapes()


def another_language_model():
    torch.manual_seed(99)
    return language_model()


def layer():
    model = models.build("linear_attention_layer", {"num_heads": 2, "head_dim": 20})
    return model, model.example_inputs(2, 16, 0), model.dynamic_shapes()


def masked():
    return Masked(), (torch.randn(2, 16, 8), torch.rand(2, 16) < 0.8)


class Masked(nn.Module):
    def forward(self, x, keep):
        return linear_attention(
            x.relu(), x.relu(), x, key_mask=keep, q_num_heads=2, kv_num_heads=2
        )[0]


def named():
    return Attend(), (torch.randn(3, 16, 8),), ({0: Dim("items"), 1: Dim("steps", max=512)},)


def fixed_batch():
    return Attend(), (torch.randn(3, 16, 8),), ({1: Dim.DYNAMIC},)


def all_fixed():
    return Attend(), (torch.randn(3, 16, 8),), (None,)


class ReturnsState(nn.Module):
    def forward(self, x):
        output, state, _ = attend(x)
        return output, state * 2, state


def returns_state():
    return ReturnsState(), (torch.randn(2, 16, 8),)


class OwnState(nn.Module):
    def forward(self, x, past_state_0):
        output, state, _ = attend(x, past_state_0, normalize=False)
        return attend(output)[0], state


def own_state():
    return OwnState(), (torch.randn(2, 16, 8), torch.randn(2, 2, 4, 4))


class Position(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Embedding(size, 8)

    def forward(self, x):
        return attend(x + self.table(torch.arange(x.shape[1])))[0]


def position():
    return Position(5000), (torch.randn(2, 16, 8),)


def short_position():
    return Position(160), (torch.randn(2, 16, 8),)


class Averaging(nn.Module):
    def forward(self, x):
        return attend(x - x.mean(1, keepdim=True))[0]


def averaging():
    return Averaging(), (torch.randn(2, 16, 8),)


class Streaming(nn.Module):
    """Every way to compute positions, and every causal convolution, that streams."""

    def __init__(self):
        super().__init__()
        self.learned = nn.Embedding(5000, 8)
        self.register_buffer("sinusoids", torch.randn(1, 5000, 8))
        self.register_buffer("numbers", torch.arange(5000)[None])
        self.register_buffer("frequencies", 0.01 ** torch.linspace(0, 1, 4))
        self.padded = nn.Conv1d(8, 8, 4, groups=8, padding=3)
        self.plain = nn.Conv1d(8, 8, 3, groups=8, bias=False)

    def forward(self, x):
        length = x.shape[1]
        x = x + self.learned(torch.arange(length)) + self.sinusoids[:, :length]
        x = x + self.learned(self.numbers[:, :length])
        angles = torch.outer(torch.arange(length).float(), self.frequencies)
        x = x * torch.cat([angles.cos(), angles.sin()], -1)
        x = self.padded(x.transpose(1, 2))[..., :length]
        x = self.plain(nn.functional.pad(x, (2, 0))).transpose(1, 2)
        return attend(x)[0]


def streaming():
    return Streaming(), (torch.randn(2, 16, 8),)


class Loop(nn.Module):
    def forward(self, x):
        state, outputs = torch.zeros(x.shape[0], x.shape[2]), []
        for t in range(x.shape[1]):
            state = state + x[:, t]
            outputs.append(state)
        return torch.stack(outputs, 1)


def loop():
    return Loop(), (torch.randn(2, 16, 8),)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        doubled = x * 2
        return doubled + self.table


def table():
    return Table(), (torch.randn(2, 16, 8),)


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def branch():
    return Branch(), (torch.randn(2, 16, 8),)


class Epsilon(nn.Module):
    def forward(self, x):
        return x / (x.relu().sum(-1, keepdim=True) + 1e-15)


def epsilon():
    return Epsilon(), (torch.randn(2, 16, 8),)


class NotANumber(nn.Module):
    def forward(self, x):
        return torch.where(x > 1, x / 0 * 0, torch.where(x < -1, -1 / (x * 0).abs(), x))


def not_a_number():
    return NotANumber(), (torch.randn(2, 16, 8),)


class Printing(nn.Module):
    def forward(self, x):
        print("{chatter of the model}")
        return x + 1


def printing():
    print("{chatter of the factory}")
    return Printing(), (torch.randn(2, 16, 8),)


def heavy():
    return nn.Linear(256, 256), (torch.randn(2, 4, 256),)


class SignedExperts(nn.Module):
    """A mixture of experts whose router gives weights of either sign."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(64, 4)
        self.up = nn.Parameter(torch.randn(4, 96, 64) / 8)
        self.down = nn.Parameter(torch.randn(4, 64, 48) / 7)

    def forward(self, x):
        _, index = self.router(x).topk(2, -1)
        weight = self.router(x).sin().gather(1, index)
        return mixture_of_experts(x, index, weight, self.up, self.down)


def signed_experts():
    return SignedExperts(), (torch.randn(6, 64),)


def parts():
    return Parts(), (torch.randn(2, 16, 6),)


class Parts(nn.Module):
    def forward(self, x):
        a, b, c = x.chunk(3, -1)
        d, e = x.split([4, 2], -1)
        return a * c + b, d.sum(-1) - e.sum(-1)


class Projected(nn.Module):
    """Queries, keys and values of x, and what a subclass makes of them under a triangle."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 1)

    def causal(self, x):
        return torch.ones(x.shape[1], x.shape[1]).tril()


class TimeFirst(Projected):
    """(T, B, C), as torch's recurrent layers have it."""

    def forward(self, x):
        x = x.transpose(0, 1)
        q, k, v = self.qkv(x).relu().chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * self.causal(x)
        return (scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)).transpose(0, 1)


def time_first():
    return TimeFirst(), (torch.randn(12, 3, 8),)


def time_first_named():
    return TimeFirst(), (torch.randn(12, 3, 8),), ({0: Dim("time"), 1: Dim("rows")},)


class TimeFirstBothWays(Projected):
    """(T, B, C) without a mask: nothing to carry."""

    def forward(self, x):
        q, k, v = self.qkv(x).relu().chunk(3, -1)
        sums = torch.einsum("tbc,tbd->bcd", k, v)
        weights = torch.einsum("tbc,bc->tb", q, k.sum(0))
        return torch.einsum("tbc,bcd->tbd", q, sums) / (weights[..., None] + 1e-6)


def time_first_both_ways():
    return TimeFirstBothWays(), (torch.randn(12, 3, 8),)


def time_first_both_ways_named():
    return TimeFirstBothWays(), (torch.randn(12, 3, 8),), ({0: Dim("time"), 1: Dim("rows")},)


class RowsAndTokens(nn.Module):
    """Attention among rows, and one among tokens: which of them is the batch only places say."""

    def forward(self, x):
        x = attend(x.transpose(0, 1), causal=False)[0].transpose(0, 1)
        return attend(x, causal=False)[0]


def rows_and_tokens():
    return RowsAndTokens(), (torch.randn(3, 12, 8),)


class HalfInside(Projected):
    """Scores in half precision of a model that takes and gives float32."""

    def forward(self, x):
        q, k, v = (part.half() for part in self.qkv(x).relu().chunk(3, -1))
        scores = (q @ k.transpose(1, 2)) * self.causal(x).half()
        return (scores @ v).float() / (scores.float().sum(-1, keepdim=True) + 1)


def half_inside():
    return HalfInside(), (torch.randn(2, 16, 8),)


class Quotients(Projected):
    """Decays as quotients of cumulative products: from some 4,000 tokens on float32 overflows."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        decay = nn.functional.logsigmoid(self.gate(x) * 0.1 + 3.8).cumsum(1)
        scores = (q * decay.exp()) @ (k * (-decay).exp()).transpose(1, 2)
        return (scores * self.causal(x)) @ v


def quotients():
    return Quotients(), (torch.randn(2, 16, 8),)


class SquareMask(Projected):
    """A mask of (L, L) as an input beside (N, L, C)."""

    def forward(self, x, mask):
        q, k, v = self.qkv(x).relu().chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * mask
        return scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)


def square_mask():
    return SquareMask(), (torch.randn(3, 12, 8), torch.ones(12, 12).tril())


class BesideSoftmax(nn.Module):
    """Linear attention, then causal softmax attention, whose keys and values are states."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (
            y.unflatten(2, (2, 4)).transpose(1, 2) for y in self.project(attend(x)[0]).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def beside_softmax():
    return BesideSoftmax(), (torch.randn(2, 16, 8),)


class TwoStepsAToken(nn.Module):
    """Every token is two of the attention's."""

    def forward(self, x):
        twice = torch.stack([x, x.roll(1, -1)], 2).flatten(1, 2)
        return attend(twice)[0].unflatten(1, (-1, 2)).sum(2)


def two_steps_a_token():
    return TwoStepsAToken(), (torch.randn(2, 16, 8),)


class SharedQueries(nn.Module):
    def forward(self, x):
        key = x[..., :4]
        return linear_attention(x, key, key, q_num_heads=2, kv_num_heads=1)[0]


def shared_queries():
    return SharedQueries(), (torch.randn(2, 16, 8),)


class NamedAsTheEnds(nn.Module):
    def forward(self, x, cu_seqlens):
        return attend(x + cu_seqlens)[0]


def named_as_the_ends():
    return NamedAsTheEnds(), (torch.randn(2, 16, 8), torch.randn(2, 16, 8))
