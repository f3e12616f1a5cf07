"""Tests of the ops run on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package", autouse=True)
def alone(one_thread: None) -> None:
    """On tensors this small more threads only wait for each other."""
