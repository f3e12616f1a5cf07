"""Linear forms that keep softmax for near keys: ``window64+elu1``.

    (sum_near exp(scale q.k) v + c sum_far phi(g q).phi(k) v) / (the same without v)

near are the last 64 tokens and the sinks; see ``linexport.models.window_attention``. c is one
number a head, fitted so that the output errs least on the calibration data, and learned with the
scale of the queries in distillation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.linearization.calibration import Rows
from linexport.linearization.find_softmax import Site, run
from linexport.linearization.forms import KernelAttention, pack
from linexport.models.feature_maps import FeatureMap
from linexport.models.softmax_calls import Attending, Call
from linexport.models.window_attention import NearFarParts, check_windowed, near_and_far
from linexport.plugins.ops.window_attention import WindowSpec
from linexport.system.json_object import JsonObject

SINKS = "sinks"
"""Option of such forms: the first tokens, which remain exact."""

MOST_TOKENS = 65_536
"""Widest window, and most first tokens: all these keys are rows of states."""

_NAME = re.compile(r"window([0-9]{1,9})\+(.+)")
_LIKE = re.compile(r"window([-+.0-9].*)?")

_TRIED = torch.linspace(-6.0, 6.0, 49, dtype=torch.float64)
"""Gains that are tried, as distances from that with which both parts weigh the same on average."""


def split_name(name: str) -> tuple[int | None, str]:
    """Return the window of a name such as ``window64+elu1``, None without one, and the map.

    Raises:
        UsageError: a window of no tokens or too many, or one without a map for older tokens.
    """
    if not _LIKE.fullmatch(name):
        return None, name
    found = _NAME.fullmatch(name)
    if found is None or _LIKE.fullmatch(found[2]) or not 1 <= int(found[1]) <= MOST_TOKENS:
        raise UsageError(
            f"Unknown map {name!r}; expected windowN+MAP, with N from 1 to {MOST_TOKENS:,} tokens "
            "and a map for older ones, such as window64+elu1."
        )
    return int(found[1]), found[2]


def joined_name(window: int | None, kind: str) -> str:
    """Return the name that ``split_name`` reads."""
    return kind if window is None else f"window{window}+{kind}"


class WindowForm(KernelAttention):
    """The form above in place of the calls of one site.

    Raises:
        UsageError: the site is not causal self-attention, or the map can be negative.
    """

    def __init__(self, site: Site, feature_map: FeatureMap, window: int, sinks: int) -> None:
        if site.cross or not site.causal:
            kind = "attends to another sequence" if site.cross else "is bidirectional"
            raise UsageError(
                f"{site.name} {kind}: a window needs causal self-attention. Take a map without a "
                f"window for it, such as --map '{site.name}={feature_map.kind}'."
            )
        check_windowed(feature_map, site.causal)
        super().__init__(site, feature_map)
        self.window = WindowSpec(site.heads, site.kv_heads, window, sinks, site.head_dim**-0.5)
        self.far_gain = nn.Parameter(torch.zeros(site.heads))

    @property
    def name(self) -> str:
        return joined_name(self.window.window, self.feature_map.kind)

    def options(self) -> JsonObject:
        return {**super().options(), SINKS: self.window.sinks}

    def forward(self, call: Call) -> Tensor:
        """(B, H, T, d_v)."""
        found = self.parts(call).joined(self.far_gain).to(call.value.dtype)
        return found.unflatten(-1, (self.window.q_num_heads, -1)).transpose(1, 2)

    def parts(self, call: Call) -> NearFarParts:
        """Return the means over near and over far keys, and the logarithms of their sums."""
        call = self.grouped(call)
        q, k = self.packed(call)
        mask = self.key_mask(call)
        return near_and_far(self.feature_map, self.window, q, k, pack(call.value), key_mask=mask)[0]


def fit_far_gains(module: nn.Module, batch: Rows, forms: Mapping[int, nn.Module]) -> None:
    """Set the gain of every such form to what errs least on one batch, head by head.

    Args:
        module: with softmax attention.
        batch: its arguments.
        forms: by the index of their sites.
    """

    def answer(index: int, call: Call) -> Tensor:
        true, form = call.softmax(), forms.get(index)
        if isinstance(form, WindowForm):
            form.far_gain.data = best_gain(form.parts(call), true).to(form.far_gain)
        return true

    if any(isinstance(form, WindowForm) for form in forms.values()):
        with torch.no_grad(), Attending(answer):
            run(module, batch)


def best_gain(parts: NearFarParts, true: Tensor) -> Tensor:
    """Return a gain (H), of parts of tokens first and a true output (B, H, T, d_v)."""
    there = parts.far_sum > parts.far_sum.new_tensor(-1e29)
    count = there.sum((0, 1, 3))
    difference = torch.where(there, parts.near_sum - parts.far_sum, 0.0).double()
    center = difference.sum((0, 1, 3)) / count.clamp(min=1)
    expected = true.transpose(1, 2)
    errors = torch.stack(
        [
            (parts.joined(center + gain).view_as(expected) - expected).square().sum((0, 1, 3))
            for gain in _TRIED
        ]
    )
    best = center + _TRIED[errors.argmin(0)]
    return torch.where(count > 0, best, 0.0)
