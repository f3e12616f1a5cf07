"""What tests of token_flow share."""

from __future__ import annotations

import pytest

from linexport.token_flow import interpreter


@pytest.fixture(autouse=True)
def own_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error of a rule end the test: a user's graph is only taken to mix tokens for it."""
    monkeypatch.setattr(interpreter, "UNEXPECTED", ())
