"""A layer of the generalized delta rule, whose decay, erase and write vectors come from x."""

import torch

from linexport.models.functional import generalized_delta_rule


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 48)

    def forward(self, x):
        q, k, v, g, a, b = self.project(x).chunk(6, -1)
        unit = torch.nn.functional.normalize(a.unflatten(-1, (2, 4)), dim=-1).flatten(-2)
        return generalized_delta_rule(
            q, k, v, torch.nn.functional.logsigmoid(g), -unit, unit * b.sigmoid(), num_heads=2
        )[0]


class Positioned(Layer):
    """The layer behind learned positions."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Embedding(64, 8)

    def forward(self, x):
        return super().forward(x + self.positions(torch.arange(x.shape[1])))


def build():
    return Layer(), (torch.randn(2, 9, 8),)


def positioned():
    return Positioned(), (torch.randn(2, 9, 8),)
