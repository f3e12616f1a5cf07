"""Feed-forward layers y = f(W x + b) of a module as kernel layers, fitted to their own inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization.calibration import Rows
from linexport.linearization.choose import KEEP, check_patterns, last
from linexport.linearization.find import run
from linexport.linearization.replace import stem
from linexport.models.feed_forward import Pair, linearize_feed_forward, pairs
from linexport.models.registry import ReferenceModel

INPUTS = 4096
"""Rows of a layer's inputs that are fitted to at most."""


@dataclass(frozen=True)
class FeedForward:
    """What was asked for; see ``linearize_feed_forward``.

    Attributes:
        forms: by patterns of layer names; later ones overrule earlier ones.
        target_error: squared error of a layer's output.
        max_cost: multiply-adds for one token.
        seed: of rows and draws.
    """

    forms: Mapping[str, str]
    target_error: float | None
    max_cost: int
    seed: int


def replace_feed_forward(
    linear: nn.Module, batches: Sequence[Rows], asked: FeedForward, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Replace layers of a module that ``with_forms`` made, in place.

    Every layer is fitted to the inputs it has when attention is in linear form already.

    Args:
        linear: the module.
        batches: its arguments.
        asked: the forms.
        say: told the cost of every layer before it is built.

    Returns:
        For every layer, as in the report: its ``name``, the fields of ``FeedForwardReport``, and
        the ``reason`` why it was left.

    Raises:
        UsageError: a pattern that fits no layer; and what ``linearize_feed_forward`` refuses.
        UnsupportedModelError: there is no layer to replace.
    """
    found = pairs(stem(linear))
    if not found:
        raise UnsupportedModelError(
            f"{type(linear).__name__} has no feed-forward layer that can be told: expected an "
            "nn.Linear that an activation follows in an nn.Sequential. Activations that a forward "
            "method calls, as those of torch.nn.TransformerEncoderLayer, are not looked for."
        )
    check_patterns(asked.forms, [pair.name for pair in found])
    forms = {pair.name: last(asked.forms, pair.name) or KEEP for pair in found}
    wanted = [pair for pair in found if forms[pair.name] != KEEP and pair.reason is None]
    inputs = _inputs(linear, wanted, batches, asked.seed)
    records: list[dict[str, Any]] = []
    configs: dict[str, Any] = {}
    for pair in found:
        if pair not in wanted or not len(inputs[pair.name]):
            idle = "it is not called" if pair in wanted else "left as it is, as asked for"
            records.append({"name": pair.name, "form": None, "reason": pair.reason or idle})
            continue
        record, config = _replaced(pair, inputs[pair.name], forms[pair.name], asked, say)
        records.append(record)
        configs[pair.name] = config
    if not configs:
        why = "; ".join(f"{r['name']}: {r['reason']}" for r in records)
        raise UnsupportedModelError(f"No feed-forward layer was replaced. {why}")
    if isinstance(linear, ReferenceModel):
        linear.config["kernel_feed_forward"] = {
            **(linear.config["kernel_feed_forward"] or {}),
            **configs,
        }
    return records


def _replaced(
    pair: Pair, inputs: Tensor, form: str, asked: FeedForward, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record and the config of a layer that is now in the place of a pair."""
    try:
        layer, report = linearize_feed_forward(
            pair.linear,
            pair.activation,
            inputs,
            form,
            target_error=asked.target_error,
            max_cost=asked.max_cost,
            seed=asked.seed,
            say=lambda table: say(f"{pair.name}\n{table}"),
        )
    except UsageError as error:
        raise UsageError(f"{pair.name}: {error}") from error
    pair.replace(layer.to(pair.linear.weight.device))
    return {"name": pair.name, "reason": None, **asdict(report)}, layer.config


def _inputs(
    linear: nn.Module, wanted: Sequence[Pair], batches: Sequence[Rows], seed: int
) -> dict[str, Tensor]:
    """Inputs of layers by their names, (n, d), drawn where there are more than ``INPUTS``."""
    seen: dict[str, list[Tensor]] = {pair.name: [] for pair in wanted}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: seen[name].append(args[0].flatten(0, -2))

    handles = [p.linear.register_forward_pre_hook(record(p.name)) for p in wanted]
    try:
        with torch.no_grad():
            for batch in batches:
                run(linear, batch)
    finally:
        for handle in handles:
            handle.remove()
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parts in seen.items():
        rows = torch.cat(parts) if parts else torch.empty(0)
        found[name] = rows[torch.randperm(len(rows), generator=generator)[:INPUTS]]
    return found
