"""Tests of the CPU library need it: it is built where a C++ compiler is."""

from __future__ import annotations

import shutil

import pytest

from linexport.errors import EnvironmentProblemError
from linexport.plugins.cpu import library


@pytest.fixture(scope="session", autouse=True)
def built(one_thread: None) -> None:
    """Skip without a compiler; with one, ``pip install -e .`` must have built the library."""
    try:
        library.path()
    except EnvironmentProblemError as error:
        if shutil.which("g++") is None and shutil.which("clang++") is None:
            pytest.skip(str(error))
        pytest.fail(f"{error} (or tools/test)")
