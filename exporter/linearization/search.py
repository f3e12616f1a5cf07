"""The search for the cheapest forms of all layers within a drop of the task's loss.

1. measure a call of every candidate: time by length, bytes of its state
2. attention transfer: all candidates of all layers learn their layer's attention
3. greedy path: from softmax everywhere, again and again the change of one layer that loses least
   for what it saves, by the smooth loss of the task; each stop of the path is a point. Where time
   runs out, drops of layers changed alone lead it on
4. bisect the path for the last point whose drop is allowed, without fine-tuning and then with it

Points are judged by an upper confidence bound on the rows of the search, which has to be within
``MARGIN`` of what is allowed, as choices are fitted to these rows. Rows the search never saw then
confirm: from the point that saves the least, each is tested at the full risk until one fails. The
first point that should fail is taken with a probability of at most that risk, whatever comes after.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from linexport.linearization.confidence import upper_bound
from linexport.linearization.fine_tune import fine_tune, tuned_tensors
from linexport.linearization.forms import KernelAttention
from linexport.linearization.replace import with_forms
from linexport.linearization.search_candidates import Candidates
from linexport.linearization.search_record import PointLosses, SearchFile
from linexport.linearization.task_loss import TaskLoss, TaskRows, squared_distance
from linexport.linearization.transfer import learned_of, transfer
from linexport.manifest.linearization_records import SOFTMAX, AttentionTime

log = logging.getLogger(__name__)

TRANSFER_UNTIL, PATH_UNTIL = 0.45, 0.7
"""Shares of the time budget by which transfer and path have ended."""

SCREENED = 8192
"""Tokens of the rows that the path is led by."""

JUDGED_IN_TRANSFER = 4096
"""Tokens that the best values of transferred forms are kept by."""

LOOKS = 4
"""Changes that are measured for one stop of the path at most."""

REACH = 20.0
"""Times the allowed drop, beyond which fine-tuning is not tried."""

LARGE = 1e30
"""In place of a loss that is not finite."""

OVERRUN = 0.05
"""Share of the time budget that a look at all rows of the search may take beyond its end."""

MARGIN = 0.9
"""Share of the allowed drop that a bound on the rows of the search may have."""

Choice = tuple[str, ...]
"""The name of the form of every site, in order."""


@dataclass(frozen=True)
class FormPoint:
    """A choice that is within the drop on the rows of the search."""

    choice: Choice
    losses: PointLosses
    tuned: bool


class FormSearch:
    """One search, whose measurements are on record.

    Args:
        original: with softmax attention, a ``shared_copy``.
        candidates: of its layers.
        task: whose loss may drop.
        data: rows to train on, and rows to choose by.
        file: the record.
        seconds: time budget.
        max_drop: allowed.
        seed: of batches.
        say: told what is done.
    """

    def __init__(
        self,
        original: nn.Module,
        candidates: Candidates,
        task: TaskLoss,
        data: tuple[TaskRows, TaskRows],
        file: SearchFile,
        seconds: float,
        max_drop: float,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.original, self.candidates, self.task = original, candidates, task
        (self.fit, self.judged), self.file = data, file
        self.seconds, self.max_drop, self.seed, self.say = seconds, max_drop, seed, say
        self.sites = candidates.sites
        self.softmax: Choice = (SOFTMAX,) * len(self.sites)
        self.screened = self.judged.take(slice(_rows_of(self.judged, SCREENED)))
        self._before: Tensor | None = None
        self._pace = 0.0  # seconds that the losses of one row took at most

    def run(self) -> tuple[list[Choice], list[FormPoint]]:
        """Return the path, and points within the drop from the one that saves the least on."""
        self._transfer()
        path = self._path()
        passing = [FormPoint(self.softmax, PointLosses(0.0, 0.0, 0), False)]
        low = self._last(path, passing, False, 0)
        self._last(path, passing, True, low)
        order = {choice: at for at, choice in enumerate(path)}
        passing.sort(key=lambda point: (order[point.choice], point.tuned))
        return path, passing

    def left(self, share: float = 1.0) -> float:
        """Return the share of the budget that is left until a share of it is spent."""
        return share - self.file.seconds / self.seconds

    def saved(self, choice: Choice) -> float:
        """Return what a choice saves; see ``Candidates.saved``."""
        pairs = zip(self.sites, choice, strict=True)
        return sum(self.candidates.saved(s, name) for s, name in pairs if name != SOFTMAX)

    def forms_of(self, choice: Choice) -> dict[int, KernelAttention]:
        """Return the forms of a choice, after attention transfer."""
        pairs = zip(self.sites, choice, strict=True)
        chosen = [(s.index, name) for s, name in pairs if name != SOFTMAX]
        return {index: self.candidates.forms[index][name] for index, name in chosen}

    def build(self, point: FormPoint) -> tuple[nn.Module, dict[int, KernelAttention]]:
        """Return the model of a point, and its forms."""
        linear, forms, tensors = self._student(point.choice)
        if point.tuned:
            self.file.restore(self._name(point.choice), tensors)
        for x in tensors:
            x.requires_grad_(False)
        return linear, forms

    def costs_of(self, choice: Choice) -> tuple[tuple[AttentionTime, ...], int]:
        """Return the times of all calls together, and the bytes of their states."""
        found = [self.candidates.cost(s, n) for s, n in zip(self.sites, choice, strict=True)]
        lengths = self.candidates.lengths
        times = tuple(
            AttentionTime(
                row.length,
                sum(cost.times[at].milliseconds for cost in found),
                any(cost.times[at].computed for cost in found),
            )
            for at, row in enumerate(found[0].times)
        )
        return times, sum(cost.bytes_at(max(lengths)) for cost in found)

    def judged_points(self, choice: Choice) -> list[FormPoint]:
        """Return what is on record of a choice, without fine-tuning and with it."""
        found = [
            (self.file.kept.points.get(_key(choice)), False),
            (self.file.kept.tuned.get(self._name(choice)), True),
        ]
        return [FormPoint(choice, losses, tuned) for losses, tuned in found if losses is not None]

    def losses(self, model: nn.Module, data: TaskRows, smooth: bool = False) -> Tensor:
        """Return the losses of a model by row."""
        begun = self.file.seconds
        found = self.task.of(model, self.original, data, smooth)
        self._pace = max(self._pace, (self.file.seconds - begun) / len(data))
        return found

    # The stages

    def _transfer(self) -> None:
        forms = {index: list(found.values()) for index, found in self.candidates.forms.items()}
        tensors = [x for ones in forms.values() for form in ones for x in learned_of(form)]
        known = self.file.kept.transferred and self.file.restore("transfer", tensors)
        if known or not tensors:
            return
        self.say("attention transfer")
        begun = self.file.seconds / self.seconds
        few = self.judged.take(slice(_rows_of(self.judged, JUDGED_IN_TRANSFER)))

        def left() -> float:
            return self.left(TRANSFER_UNTIL) / max(TRANSFER_UNTIL - begun, 1e-9)

        steps = transfer(self.original, forms, self.fit, few, left, self.seed)
        log.info("attention transfer took %d steps", steps)
        self.file.keep("transfer", tensors)
        self.file.kept.transferred = True
        self.file.save()

    def _path(self) -> list[Choice]:
        """Choices from softmax everywhere on, each with one layer changed."""
        self.say("greedy path")
        path, current = [self.softmax], self.softmax
        known = {}
        for at, name in self._moves(current):
            if self.left(PATH_UNTIL) > 0 or self._measured(_with(current, at, name)):
                known[at, name] = self._loss(_with(current, at, name)) - self._loss(current)
        while True:
            found = self._next(current, known)
            if found is None:
                return path
            current = found
            path.append(current)
            self.say(f"greedy path, {len(path) - 1} changes")

    def _next(self, current: Choice, known: dict[tuple[int, str], float]) -> Choice | None:
        """The next stop; drops that are known from earlier stops say in which order to look."""
        base = self._loss(current)

        def price(move: tuple[int, str], drop: float) -> float:
            at, name = move
            gain = self.saved(_with(current, at, name)) - self.saved(current)
            return max(drop, 1e-4 * abs(base)) / gain

        moves = [move for move in self._moves(current) if move in known]
        ordered = sorted(
            (price(move, known[move] - known.get((move[0], current[move[0]]), 0.0)), move)
            for move in moves
        )
        best: tuple[float, Choice] | None = None
        for at, (expected, move) in enumerate(ordered):
            choice = _with(current, *move)
            if best is not None and (best[0] <= expected or at >= LOOKS):
                break
            if not (self.left(PATH_UNTIL) > 0 or self._measured(choice)):
                return choice if best is None else best[1]  # by drops of single layers alone
            now = price(move, self._loss(choice) - base)
            if self._loss(choice) < LARGE and (best is None or now < best[0]):
                best = now, choice
        return None if best is None else best[1]

    def _moves(self, current: Choice) -> list[tuple[int, str]]:
        """Changes of one layer that save something."""
        found = []
        for at, site in enumerate(self.sites):
            own = 0.0 if current[at] == SOFTMAX else self.candidates.saved(site, current[at])
            names = self.candidates.forms[site.index]
            found += [(at, n) for n in names if self.candidates.saved(site, n) > own]
        return found

    def _last(self, path: Sequence[Choice], passing: list[FormPoint], tuned: bool, low: int) -> int:
        """Bisect for the last point of the path within the drop, from one that is; give its place.

        Points that are within it are added to ``passing``.
        """
        high = len(path) - 1
        while low < high:
            middle = (low + high + 1) // 2
            share = 1 / math.ceil(math.log2(high - low + 1))
            choice = path[middle]
            found = self.judge(choice)
            if tuned and found is not None and found.drop <= REACH * self.max_drop:
                found = self.tune(choice, share)
            if found is None:
                break
            if self.passes(found):
                low = middle
                passing.append(FormPoint(choice, found, tuned))
            else:
                high = middle - 1
        return low

    def passes(self, losses: PointLosses) -> bool:
        """Return whether a point is within the drop on the rows of the search."""
        return losses.bound <= MARGIN * self.max_drop

    def judge(self, choice: Choice) -> PointLosses | None:
        """Judge a choice without fine-tuning; None where the time is over."""
        points = self.file.kept.points
        if _key(choice) not in points:
            if not self._time_for(1 if self._before is not None else 2):
                return None
            self.say(f"judging {_counted(choice)}")
            model = with_forms(self.original, self.forms_of(choice))
            points[_key(choice)] = self._compared(self.losses(model, self.judged), 0)
            self.file.save()
        return points[_key(choice)]

    def tune(self, choice: Choice, share: float) -> PointLosses | None:
        """Fine-tune a choice in a share of the time that is left; None where it is over.

        What an earlier run left unfinished goes on from its weights.
        """
        name, kept = self._name(choice), self.file.kept.tuned
        linear, _, tensors = self._student(choice)
        found = kept.get(name)
        restored = found is not None and self.file.restore(name, tensors)
        if found is not None and restored and not (found.cut and self._may_gain(found)):
            return found
        if not self._time_for(2):
            return None
        before = 0 if found is None else found.steps
        kept[name] = self._tuned(choice, linear, tensors, share, before)
        self.file.keep(name, tensors)
        self.file.save()
        return kept[name]

    def _tuned(
        self,
        choice: Choice,
        linear: nn.Module,
        tensors: Sequence[Tensor],
        share: float,
        before: int,
    ) -> PointLosses:
        """Fine-tune a student in place, so that the time is enough for its last look."""
        part, looks = self.left() * share, list[tuple[float, PointLosses]]()
        end, look = self.left() - part, 0.0

        def left() -> float:
            return (self.left() - end - look) / part

        def judge() -> tuple[float, bool]:
            nonlocal look
            begun, losses = self.left(), self.losses(linear, self.judged)
            smooth = losses
            if self.task.smooth is not self.task.judged:
                smooth = self.losses(linear, self.judged, smooth=True)
            look = max(look, begun - self.left())
            looks.append((float(smooth.mean()), self._compared(losses, 0)))
            self.say(f"fine-tuning {_counted(choice)}, drop {looks[-1][1].drop:.4f}")
            return looks[-1][0], self.passes(looks[-1][1])

        self.say(f"fine-tuning {_counted(choice)}")
        logits = self.task.smooth is not squared_distance
        done = fine_tune(self.original, linear, tensors, self.fit, judge, left, logits, self.seed)
        best = looks[-1] if self.passes(looks[-1][1]) else min(looks, key=lambda one: one[0])
        return replace(best[1], steps=before + done.steps, cut=left() <= 0)

    def _time_for(self, looks: int) -> bool:
        """Return whether so many looks at the rows of the search will end in time."""
        expected = looks * self._pace * len(self.judged) / self.seconds
        return self.left() > 0 and expected <= self.left() + OVERRUN

    def _may_gain(self, losses: PointLosses) -> bool:
        return self.left() > 0 and not self.passes(losses)

    # Measurements

    def _name(self, choice: Choice) -> str:
        """Name of a fine-tuned choice on record: how long it takes depends on what is allowed."""
        digest = hashlib.sha256(_key(choice).encode()).hexdigest()[:12]
        return f"tuned-{digest}-{self.max_drop:g}"

    def _student(
        self, choice: Choice
    ) -> tuple[nn.Module, dict[int, KernelAttention], list[Tensor]]:
        forms = copy.deepcopy(self.forms_of(choice))
        linear = with_forms(self.original, forms)
        return linear, forms, tuned_tensors(linear, [s for s in self.sites if s.index in forms])

    def _compared(self, after: Tensor, steps: int) -> PointLosses:
        if self._before is None:
            self._before = self.losses(self.original, self.judged)
        differences = after - self._before
        bound = upper_bound(differences, self.task.counted)
        return PointLosses(_finite(float(differences.mean())), _finite(bound), steps)

    def _measured(self, choice: Choice) -> bool:
        return _key(choice) in self.file.kept.losses

    def _loss(self, choice: Choice) -> float:
        """The smooth loss of a choice on some rows of the search."""
        losses = self.file.kept.losses
        if _key(choice) not in losses:
            model = with_forms(self.original, self.forms_of(choice))
            found = self.losses(model, self.screened, smooth=True)
            losses[_key(choice)] = _finite(float(found.mean()))
            self.file.save()
        return losses[_key(choice)]


@dataclass(frozen=True)
class Confirmed:
    """The result, and its losses and the original's by row that the search never saw."""

    point: FormPoint
    before: Tensor
    after: Tensor


def confirmed(search: FormSearch, passing: Sequence[FormPoint], rows: TaskRows) -> Confirmed:
    """Return the last of the points that rows the search never saw confirm.

    Args:
        search: that found them.
        passing: from the one that saves the least on; the first is softmax everywhere.
        rows: that the search never saw.
    """
    before = search.losses(search.original, rows)
    found = Confirmed(passing[0], before, before)
    for point in passing[1:]:
        after = search.losses(search.build(point)[0], rows)
        if upper_bound(after - before, search.task.counted) > search.max_drop:
            break
        found = Confirmed(point, before, after)
    return found


def _with(choice: Choice, at: int, name: str) -> Choice:
    return (*choice[:at], name, *choice[at + 1 :])


def _key(choice: Choice) -> str:
    return " | ".join(choice)


def _counted(choice: Choice) -> str:
    linear = sum(name != SOFTMAX for name in choice)
    return f"{linear} of {len(choice)} layers linear"


def _rows_of(data: TaskRows, tokens: int) -> int:
    """Rows with so many tokens, at least one of each batch."""
    length = 1 if data.rows[0].dim() < 2 else int(data.rows[0].shape[1])
    return max(8, tokens // length)


def _finite(value: float) -> float:
    """A large number in place of what JSON does not have."""
    return value if math.isfinite(value) else LARGE
