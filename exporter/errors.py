"""Errors a user can cause or meet, each with the exit code the command line gives it.

A message says what was found, what was expected and what to do next; the command line prints it
without a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linexport.option_names import shown


class LinexportError(Exception):
    """Base of all errors raised on purpose.

    Its message names options by flags; see ``option_names`` for how they are shown.
    """

    exit_code = 1

    def __str__(self) -> str:
        return shown(super().__str__())


class StoppedAfterPass(LinexportError):  # noqa: N818 - not a failure: the user requested it
    """A conversion that ended after the pass its user named; no artifact was made."""

    exit_code = 0


class UsageError(LinexportError):
    """The request itself cannot be carried out: a bad path, option or combination."""

    exit_code = 2


class NoFreeSlotError(UsageError):
    """Every slot of a pool holds an open session."""


class ParityError(LinexportError):
    """The converted model does not equal the original, or loses more than is allowed."""

    exit_code = 3


class RegressionError(LinexportError):
    """An artifact is slower, larger or less exact than the baseline allows."""

    exit_code = 3


class SignatureError(LinexportError):
    """An artifact is not as it was signed, or not signed at all."""

    exit_code = 3


class NonFiniteError(LinexportError):
    """NaN or infinity in an input or a state of a stream.

    Attributes:
        names: inputs or states that have any.
        rows: indices along the batch.
        outputs: by name, where the other rows were advanced; theirs are valid.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        names: tuple[str, ...] = (),
        rows: tuple[int, ...] = (),
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.names, self.rows, self.outputs = names, rows, outputs


class UnsupportedModelError(LinexportError):
    """The model or file is understood to be something linexport does not convert."""

    exit_code = 4


class NothingComparedError(UnsupportedModelError):
    """The original gives nothing that an artifact of it could be compared with."""


class OpError(UnsupportedModelError, ValueError):
    """Attributes or input shapes of a linexport op contradict its definition."""


class EnvironmentProblemError(LinexportError):
    """Something outside the model is missing: a library, a provider, space on disk."""

    exit_code = 5


class BuildError(LinexportError):
    """Tracing or lowering failed."""

    exit_code = 6


class TimeLimitError(BaseException):
    """A call of a model took longer than is allowed, and was ended.

    An interruption, as KeyboardInterrupt is: no check takes it for a failure of the model.
    """

    exit_code = EnvironmentProblemError.exit_code
