"""Feed-forward layers y = f(W x + b) of a module as kernel layers, fitted to their own inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization.activation_calls import Activated, Activating, Use, as_linear
from linexport.linearization.calibration import Rows
from linexport.linearization.choose_forms import KEEP, check_patterns, last
from linexport.linearization.feed_forward_times import Before, feed_forward_times
from linexport.linearization.find_softmax import numbered, run
from linexport.linearization.replace import WithForms, stem
from linexport.manifest.linearization_records import FeedForwardRow
from linexport.models.feed_forward import (
    ACTIVATIONS,
    NewLayer,
    linear_activation_pairs,
    linearize_feed_forward,
)
from linexport.models.registry import ReferenceModel

INPUTS = 4096
"""Rows of a layer's inputs that are fitted to at most."""

NEXT = 0.5
"""Share of the multiply-adds that is tried next where a layer is not faster than before."""


@dataclass(frozen=True)
class FeedForwardConfig:
    """Requested form of feed-forward layers; see ``linearize_feed_forward``.

    Attributes:
        forms: by patterns of layer names; later ones overrule earlier ones.
        target_error: squared error of a layer's output.
        max_cost: multiply-adds for one token.
        seed: of rows and draws.
        bench: measure the time of layers.
        threads: of ONNX Runtime then, 0 for its own choice.
    """

    forms: Mapping[str, str]
    target_error: float | None
    max_cost: int
    seed: int
    bench: bool
    threads: int


@dataclass
class FeedForwardSite:
    """A linear layer and its activation, as one run after another comes by them.

    Attributes:
        name: path of the linear layer; ``#2`` and so on where it runs more than once.
        first: of the runs; later ones have the same layer.
        inputs: x of all runs, each (n, d).
        uses: of what comes out, in the first run: arguments of linear layers, None for others.
    """

    name: str
    first: Activated
    inputs: list[Tensor] = field(default_factory=list)
    uses: list[Use | None] = field(default_factory=list)

    @property
    def following(self) -> nn.Linear | None:
        """The linear layer that alone is given what comes out."""
        if len(self.uses) != 1 or self.uses[0] is None:
            return None
        return as_linear(self.uses[0]["weight"], self.uses[0].get("bias"))

    @property
    def reason(self) -> str | None:
        """Why it cannot be replaced; None where it can."""
        if self.first.name in ACTIVATIONS:
            return None
        return f"its activation is {self.first.name}; forms are of {', '.join(ACTIVATIONS)}"


def find_pairs(linear: nn.Module, batches: Sequence[Rows]) -> list[FeedForwardSite]:
    """Every linear layer whose output goes into an activation, in the order of calls.

    Args:
        linear: a module that ``with_forms`` made.
        batches: its arguments; it runs on all of them.

    Raises:
        UnsupportedModelError: there is none, or they change from run to run.
    """
    names = {id(p): n.rpartition(".")[0] for n, p in stem(linear).named_parameters()}
    runs = [_run(linear, batch, names) for batch in batches]
    if not runs[0]:
        raise UnsupportedModelError(
            f"No feed-forward layer found in {type(stem(linear)).__name__}. Supported: nn.Linear "
            "whose output goes into an activation function or module. Inlined activations and "
            "layers of other classes, such as gelu_new and Conv1D of GPT-2 in transformers, "
            "are not."
        )
    if any([place.name for place in found] != [place.name for place in runs[0]] for found in runs):
        raise UnsupportedModelError(
            "The module calls different linear layers with activations on different batches: "
            "they cannot be matched."
        )
    for found in runs[1:]:
        for place, again in zip(runs[0], found, strict=True):
            place.inputs += again.inputs
    return runs[0]


def _run(linear: nn.Module, batch: Rows, names: Mapping[int, str]) -> list[FeedForwardSite]:
    places: list[FeedForwardSite] = []

    def record(index: int, activated: Activated) -> Tensor:
        name = names.get(id(activated.weight), "") or "linear"
        own = numbered(name, [place.name for place in places])
        places.append(FeedForwardSite(own, activated, [activated.input.detach().flatten(0, -2)]))
        return activated.plain()

    def follow(index: int, activated: Activated, use: Use | None) -> None:
        places[index].uses.append(use)

    watched = (
        linear.answered(record, follow)
        if isinstance(linear, WithForms)
        else Activating(record, follow)
    )
    with torch.no_grad(), watched:
        run(stem(linear), batch)
    # A layer that an activation follows is to be replaced itself.
    own = {id(place.first.weight) for place in places}
    for place in places:
        place.uses = [None if use and id(use["weight"]) in own else use for use in place.uses]
    return places


def replace_feed_forward(
    linear: nn.Module,
    batches: Sequence[Rows],
    config: FeedForwardConfig,
    say: Callable[[str], None],
) -> list[FeedForwardRow]:
    """Replace layers of a module that ``with_forms`` made, in place.

    Every layer is fitted to the inputs it has when attention is in linear form already.

    Args:
        linear: the module.
        batches: its arguments.
        config: the forms.
        say: called with the cost of every layer before it is built.

    Returns:
        For every layer, as in the report: its ``name``, the fields of ``FeedForwardReport``, and
        the ``reason`` why it was left.

    Raises:
        UsageError: a pattern that fits no layer; and what ``linearize_feed_forward`` refuses.
        UnsupportedModelError: the module has no layer to replace.
    """
    places = find_pairs(linear, batches)
    check_patterns(config.forms, [place.name for place in places])
    records: list[FeedForwardRow] = []
    layers: dict[int, NewLayer] = {}
    for index, place in enumerate(places):
        form = last(config.forms, place.name) or KEEP
        if form == KEEP or place.reason:
            reason = place.reason or "left as it is, as requested"
            records.append(FeedForwardRow(name=place.name, reason=reason))
            continue
        layers[index], record = _fitted(place, form, config, say)
        records.append(record)
    if not layers:
        why = "; ".join(f"{r.name}: {r.reason}" for r in records)
        raise UnsupportedModelError(f"No feed-forward layer was replaced. {why}")
    if isinstance(linear, WithForms):
        linear.layers.put(layers)
    else:
        assert isinstance(linear, ReferenceModel)
        _put(linear, {places[index].name: layer for index, layer in layers.items()})
    return records


def _fitted(
    place: FeedForwardSite, form: str, config: FeedForwardConfig, say: Callable[[str], None]
) -> tuple[NewLayer, FeedForwardRow]:
    """The layer; of low-rank ones, which have a choice, the first that is faster than before."""
    layer, record = found = _made(place, form, config, say)
    free = form == "low-rank" and config.target_error is None and config.bench
    while free and not record.pays and record.multiply_adds:
        config = replace(config, max_cost=int(NEXT * record.multiply_adds))
        try:
            layer, record = _made(place, form, config, say)
        except UsageError:  # rank 1 costs more
            return found
    return (layer, record) if record.pays else found


def _made(
    place: FeedForwardSite, form: str, config: FeedForwardConfig, say: Callable[[str], None]
) -> tuple[NewLayer, FeedForwardRow]:
    rows, before = torch.cat(place.inputs), place.first.linear()
    generator = torch.Generator().manual_seed(config.seed)
    try:
        layer, report = linearize_feed_forward(
            before,
            place.first.name,
            rows[torch.randperm(len(rows), generator=generator)[:INPUTS]],
            form,
            following=place.following,
            target_error=config.target_error,
            max_cost=config.max_cost,
            seed=config.seed,
            say=lambda table: say(f"{place.name}\n{table}"),
        )
    except UsageError as error:
        raise UsageError(f"{place.name}: {error}") from error
    times = None
    if config.bench:
        following = place.following if report.folded else None
        replaced = Before(before, place.first.name, following)
        times = feed_forward_times(replaced, layer, rows, config.threads)
    record = FeedForwardRow(name=place.name, **asdict(report), times=times)
    return layer.to(place.first.weight.device), record


def _put(linear: ReferenceModel, layers: Mapping[str, NewLayer]) -> None:
    """Into a stack of linexport's layers, whose config then has them."""
    for pair in linear_activation_pairs(linear):
        if pair.name in layers:
            pair.replace(layers[pair.name])
    linear.config["kernel_feed_forward"] = {
        **(linear.config["kernel_feed_forward"] or {}),
        **{name: layer.config for name, layer in layers.items()},
    }
