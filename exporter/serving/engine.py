"""One thread that advances the sequences of all requests together.

    submit --> waiting --a free slot--> active --advance--> receive --> done: the slot is free
                                          ^------- next inputs ---'

The thread alone touches tasks; others submit and cancel. A cancelled task leaves before the next
step. Whatever goes wrong with one task ends that task.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from linexport.errors import LinexportError, NoFreeSlotError, UsageError
from linexport.serving.pool import Outcome, Pool
from linexport.serving.session import Session
from linexport.serving.task import Feeds, Task

log = logging.getLogger(__name__)

TICK = 1.0
"""Seconds after which an engine without work looks for sequences that were left."""

SECONDS, WEIGHT = 1.0, 0.2
"""Time that a task takes: first guess, and weight of a new one in the running mean."""


class QueueFullError(LinexportError):
    """All slots are taken and as many requests wait as may.

    Attributes:
        retry_after: seconds until a slot is likely to be free.
    """

    exit_code = 5

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with both arguments, for a caller in another process."""
        return type(self), (str(self), self.retry_after)


class StoppedError(LinexportError):
    """The engine stops, or has stopped."""

    exit_code = 5


class StepError(LinexportError):
    """A step of all sequences failed."""


class Engine:
    """Runs tasks on a pool.

    Args:
        pool: nobody else opens sessions in it.
        queue: tasks that may wait for a slot.
        idle: seconds that a held session is kept.
        after_step: called in the engine's thread after every step.
    """

    def __init__(
        self, pool: Pool, *, queue: int, idle: float, after_step: Callable[[], None]
    ) -> None:
        self.pool = pool
        self._queue, self._idle, self._after_step = queue, idle, after_step
        self._waiting: deque[Task] = deque()
        self._active: dict[Session, tuple[Task, float]] = {}
        self._held: dict[str, tuple[Session, float]] = {}
        self._changed = threading.Condition()
        self._stopping = self._parking = False
        self._seconds = SECONDS
        self._thread = threading.Thread(target=self._run, name="linexport-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether it takes tasks."""
        return self._thread.is_alive() and not self._stopping

    @property
    def sessions(self) -> int:
        """Number of slots that are taken."""
        return len(self._active) + len(self._held)

    @property
    def waiting(self) -> int:
        """Number of tasks without a slot."""
        return len(self._waiting)

    def submit(self, *tasks: Task) -> None:
        """Let tasks wait for a slot each.

        Raises:
            QueueFullError: too many wait already.
            StoppedError: the engine stops.
        """
        with self._changed:
            if not self.alive:
                raise StoppedError("The server is shutting down.")
            if all(task.resumes for task in tasks):  # they have a slot
                self.follow(*tasks)
                self._changed.notify_all()
                return
            free = self.pool.slots - self.sessions
            if len(self._waiting) + len(tasks) > self._queue + max(0, free):
                raise QueueFullError(
                    f"All {self.pool.slots} slots are taken and {len(self._waiting)} requests "
                    f"wait; at most {self._queue} may. Try again later.",
                    self._retry_after(),
                )
            self._waiting.extend(tasks)
            self._changed.notify_all()

    def follow(self, *tasks: Task) -> None:
        """Let tasks be the next ones: those that a running one has made, in its thread."""
        self._waiting.extendleft(reversed(tasks))

    def cancel(self, *tasks: Task) -> None:
        """Free the slots of tasks before the next step."""
        with self._changed:
            for task in tasks:
                task.cancelled = True
            self._changed.notify_all()

    def release(self, name: str) -> None:
        """Close a held session."""
        with self._changed:
            self._close_held(name)

    def stop(self, *, park: bool) -> None:
        """Stop after the step in progress, and end every task: park it, or fail it."""
        with self._changed:
            self._stopping, self._parking = True, park
            self._changed.notify_all()
        self._thread.join()

    def _retry_after(self) -> int:
        rounds = (len(self._waiting) + 1) / self.pool.slots
        return min(60, max(1, round(self._seconds * rounds)))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due, TICK)
                if self._stopping:
                    break
                self._leave()
                self._admit()
            if self._active:
                self._step()
            self._after_step()
        self._end()
        self._after_step()

    def _due(self) -> bool:
        return bool(self._stopping or (self._waiting and self._room()) or self._active)

    def _room(self) -> bool:
        """Return whether the first task in the queue can begin, or need not."""
        first = self._waiting[0]
        return bool(first.resumes) or first.cancelled or self.sessions < self.pool.slots

    def _leave(self) -> None:
        """Close the sessions of cancelled tasks, and held ones that were left."""
        for session, (task, _) in list(self._active.items()):
            if task.cancelled:
                self._close(session)
        self._waiting = deque(task for task in self._waiting if not task.cancelled)
        old = time.monotonic() - self._idle
        for name in [n for n, (_, used) in self._held.items() if used < old]:
            log.info("sequence %s was left", name)
            self._close_held(name)

    def _admit(self) -> None:
        while self._waiting and self._room():
            task = self._waiting.popleft()
            try:
                self._begin(task)
            except NoFreeSlotError:  # somebody else uses the pool
                self._waiting.appendleft(task)
                return
            except Exception as error:
                task.fail(error)

    def _begin(self, task: Task) -> None:
        if task.resumes is None:
            session = self.pool.open(task.state())
        elif task.resumes in self._held:
            session, _ = self._held.pop(task.resumes)
        else:
            raise UsageError(f"The sequence {task.resumes} is not open, or is busy.")
        self._active[session] = task, time.monotonic()
        try:
            self._go_on(session, task.begin())
        except Exception:
            self._close(session)
            raise

    def _step(self) -> None:
        for session, outcome in self._advance().items():
            task, _ = self._active[session]
            try:
                if isinstance(outcome, LinexportError):
                    raise outcome
                following = task.receive(outcome, session)
                if not session.queued:
                    self._go_on(session, following)
            except Exception as error:
                self._close(session)
                task.fail(error)

    def _advance(self) -> Mapping[Session, Outcome]:
        try:
            return self.pool.advance()
        except Exception as error:
            log.exception("a step failed")
            failed = StepError(f"The model could not be run: {error}")
            return dict.fromkeys(self._active, failed)

    def _go_on(self, session: Session, feeds: Feeds | None) -> None:
        task, begun = self._active[session]
        if feeds is not None:
            session.push(feeds, logits_to_keep=task.logits_to_keep)
            return
        self._seconds += WEIGHT * (time.monotonic() - begun - self._seconds)
        if task.holds is None:
            self._close(session)
        else:
            del self._active[session]
            self._close_held(task.holds)
            self._held[task.holds] = session, time.monotonic()

    def _close(self, session: Session) -> None:
        del self._active[session]
        session.close()

    def _close_held(self, name: str) -> None:
        session, _ = self._held.pop(name, (None, 0.0))
        if session is not None:
            session.close()

    def _end(self) -> None:
        tasks = [(task, session) for session, (task, _) in self._active.items()]
        for task, session in [*tasks, *((task, None) for task in self._waiting)]:
            try:
                if not self._parking:
                    raise StoppedError("The server is shutting down.")
                task.park(session)
            except Exception as error:
                task.fail(error)
        self.pool.close()
