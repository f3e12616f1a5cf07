"""Errors of distilled layers after their output projections, each on the original's own inputs.

    error = |P^ o^ - P o| / |P o|      P^ the projection that was learned, o^ the form's output

Distillation learns the projections, so that errors before them say little. Every layer is given
what the original's attention is given: errors of earlier layers are not in it. Beside it stands
the error of attending to all keys alike, with the original's projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linexport.linearization.calibration import Rows
from linexport.linearization.distil import layer_outputs
from linexport.linearization.find_softmax import Site
from linexport.linearization.judge import standard_errors, uniform
from linexport.linearization.replace import WithForms, stem
from linexport.models.softmax_calls import Attending, Call


@dataclass
class ProjectedSums:
    """Squared differences by row, and the squares of the true outputs.

    Attributes:
        form: of the form.
        alike: of attending to all keys alike.
        size: of the original's outputs.
    """

    form: list[float] = field(default_factory=list)
    alike: list[float] = field(default_factory=list)
    size: float = 0.0

    @property
    def error(self) -> float:
        """Relative error of the form."""
        return math.sqrt(sum(self.form) / (self.size or 1.0))

    @property
    def uniform_error(self) -> float:
        """Relative error of attending to all keys alike."""
        return math.sqrt(sum(self.alike) / (self.size or 1.0))

    @property
    def margin(self) -> float | None:
        """See ``AttentionRow``."""
        return standard_errors([*zip(self.form, self.alike, strict=True)])

    def add(
        self, got: Sequence[Tensor], alike: Sequence[Tensor], want: Sequence[Tensor], rows: int
    ) -> None:
        """Outputs of one batch of so many rows."""
        self.form += _by_row(got, want, rows)
        self.alike += _by_row(alike, want, rows)
        self.size += sum(float(y.double().square().sum()) for y in want)


@torch.no_grad()
def projected_errors(
    original: nn.Module, linear: nn.Module, sites: Sequence[Site], batches: Sequence[Rows]
) -> dict[int, ProjectedSums]:
    """Errors of each site's form, and of attending to all keys alike, by its index.

    Sites without an output projection are left out.
    """
    judged = {site.index: site.projection for site in sites if site.projection is not None}
    names = list(judged.values())
    sums = {name: ProjectedSums() for name in names}
    for batch in batches:
        calls: list[Call] = []
        inputs: dict[str, object] = {}
        with _recorded(original, sites, inputs), Attending(_record(calls)):
            want = layer_outputs(original, names, batch)
        with Attending(lambda index, _, calls=calls: uniform(calls[index])):  # type: ignore[misc]
            alike = layer_outputs(original, names, batch)
        with _given(linear, calls, inputs):
            got = layer_outputs(stem(linear), names, batch)
        for name, total in sums.items():
            total.add(got[name], alike[name], want[name], len(batch[0]))
    return {index: sums[name] for index, name in judged.items()}


def _record(calls: list[Call]) -> Callable[[int, Call], Tensor]:
    def answer(index: int, call: Call) -> Tensor:
        calls.append(call)
        return call.softmax()

    return answer


def _by_row(got: Sequence[Tensor], want: Sequence[Tensor], rows: int) -> list[float]:
    squares = [
        (g - w).double().square().reshape(rows, -1).sum(1) for g, w in zip(got, want, strict=True)
    ]
    found: list[float] = torch.stack(squares).sum(0).tolist()
    return found


@contextmanager
def _recorded(
    original: nn.Module, sites: Sequence[Site], inputs: dict[str, object]
) -> Iterator[None]:
    """Keeps what modules with the names of sites are given."""

    def keep(name: str) -> Any:
        return lambda _, args, kwargs: inputs.__setitem__(name, (args, kwargs))

    modules = dict(original.named_modules())
    with ExitStack() as stack:
        for name in {site.name for site in sites} & set(modules):
            hook = modules[name].register_forward_pre_hook(keep(name), with_kwargs=True)
            stack.callback(hook.remove)
        yield


@contextmanager
def _given(
    linear: nn.Module, calls: Sequence[Call], inputs: Mapping[str, object]
) -> Iterator[None]:
    """Forms get the calls of the original; layers of a rebuilt stack, the inputs of its layers."""
    with ExitStack() as stack:
        if isinstance(linear, WithForms):
            answer = linear.forms.answer
            stack.enter_context(Attending(lambda index, _: answer(index, calls[index])))
        else:
            modules = dict(linear.named_modules())
            for name, given in inputs.items():
                hook = modules[name].register_forward_pre_hook(
                    lambda *_, given=given: given, with_kwargs=True
                )
                stack.callback(hook.remove)
        yield
