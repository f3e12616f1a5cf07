"""Recurrent layers of PyTorch as the loops over tokens that they compute.

    RNN     h_t = tanh(a_t + U h_{t-1} + c),  a_t = W x_t + b of all gates at once
    GRU     r, z = sigmoid of theirs,  n = tanh(a_t + r (U h_{t-1} + c)),  h_t = n + z (h_{t-1} - n)
    LSTM    i, f, o = sigmoid of theirs,  c_t = f c_{t-1} + i tanh(g),  h_t = o tanh(c_t)

torch.export unrolls them to the length of the example. Source: documentation of torch.nn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.patches.packages import Function
from linexport.system.versions import TORCH

__all__ = ["LAYERS", "has_recurrent_layers"]

States = tuple[Tensor, ...]
Step = Callable[[nn.RNNBase, Tensor, Tensor, States], States]
"""From the layer, the gates of the token and of the state, and the states: the next states."""


def _rnn_step(layer: nn.RNNBase, token: Tensor, before: Tensor, states: States) -> States:
    sums = token + before
    return (F.relu(sums) if layer.mode == "RNN_RELU" else torch.tanh(sums),)


def _gru_step(layer: nn.RNNBase, token: Tensor, before: Tensor, states: States) -> States:
    (state,) = states
    reset, keep, new = token.chunk(3, -1)
    reset_before, keep_before, new_before = before.chunk(3, -1)
    new = torch.tanh(new + torch.sigmoid(reset + reset_before) * new_before)
    return (new + torch.sigmoid(keep + keep_before) * (state - new),)


def _lstm_step(layer: nn.RNNBase, token: Tensor, before: Tensor, states: States) -> States:
    write, forget, new, show = (token + before).chunk(4, -1)
    cell = torch.sigmoid(forget) * states[1] + torch.sigmoid(write) * torch.tanh(new)
    return torch.sigmoid(show) * torch.tanh(cell), cell


def _one_direction(
    layer: nn.RNNBase, step: Step, x: Tensor, states: States, name: str
) -> tuple[Tensor, States]:
    """Return the outputs of one layer in one direction, (B, T, H), and its last states.

    Args:
        layer: has the weights.
        step: of its kind.
        x: (B, T, C).
        states: (B, H) each.
        name: ending of the names of its weights.
    """
    into, within = (getattr(layer, f"weight_{kind}_{name}") for kind in ("ih", "hh"))
    biases = [getattr(layer, f"bias_{kind}_{name}", None) for kind in ("ih", "hh")]
    project = getattr(layer, f"weight_hr_{name}", None)
    tokens, out = F.linear(x, into, biases[0]), []
    for t in range(x.shape[1]):
        before = F.linear(states[0], within, biases[1])
        states = step(layer, tokens[:, t], before, states)
        if project is not None:
            states = (F.linear(states[0], project), *states[1:])
        out.append(states[0])
    return torch.stack(out, 1), states


def _layers(
    layer: nn.RNNBase, step: Step, x: Tensor, starts: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all layers and directions, (B, T, C), and their last states."""
    count, last = 1 + layer.bidirectional, list[States]()
    for number in range(layer.num_layers):
        found = []
        for turned in range(count):
            states = tuple(start[number * count + turned] for start in starts)
            given, name = x.flip(1) if turned else x, f"l{number}{'_reverse' * turned}"
            out, states = _one_direction(layer, step, given, states, name)
            found.append(out.flip(1) if turned else out)
            last.append(states)
        x = torch.cat(found, -1) if len(found) > 1 else found[0]
    return x, [torch.stack(own) for own in zip(*last, strict=True)]


def _run(
    layer: nn.RNNBase, step: Step, x: Tensor, starts: Sequence[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    """Return what a layer gives, in its layout, from states of zeros where none are given."""
    alone = x.dim() == 2
    if alone:
        x = x[None] if layer.batch_first else x[:, None]
        starts = starts and [start[:, None] for start in starts]
    x = x if layer.batch_first else x.transpose(0, 1)
    if starts is None:
        count = layer.num_layers * (1 + layer.bidirectional)
        widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        kept = widths if layer.mode == "LSTM" else widths[:1]
        starts = [x.new_zeros(count, x.shape[0], width) for width in kept]
    out, last = _layers(layer, step, x, starts)
    out = out if layer.batch_first else out.transpose(0, 1)
    if alone:
        out = out[0] if layer.batch_first else out[:, 0]
        last = [state[:, 0] for state in last]
    return out, last


def _rnn(layer: nn.RNN, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Stands in for ``torch.nn.RNN.forward``."""
    out, (last,) = _run(layer, _rnn_step, input, None if hx is None else [hx])
    return out, last


def _gru(layer: nn.GRU, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Stands in for ``torch.nn.GRU.forward``."""
    out, (last,) = _run(layer, _gru_step, input, None if hx is None else [hx])
    return out, last


def _lstm(
    layer: nn.LSTM, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Stands in for ``torch.nn.LSTM.forward``."""
    out, (last, cell) = _run(layer, _lstm_step, input, hx)
    return out, (last, cell)


_MODULE = nn.RNNBase.__module__

LAYERS = (
    Function(_MODULE, "RNN.forward", _rnn, str(TORCH)),
    Function(_MODULE, "GRU.forward", _gru, str(TORCH)),
    Function(_MODULE, "LSTM.forward", _lstm, str(TORCH)),
)


def has_recurrent_layers(model: nn.Module) -> bool:
    """Return whether a model has such a layer."""
    return any(isinstance(part, nn.RNNBase) for part in model.modules())
