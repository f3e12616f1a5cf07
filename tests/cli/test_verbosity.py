"""``-v`` and ``-vv``: nothing by default, decisions, and reasons against, on standard error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The log of this process as it was."""
    log = logging.getLogger("linexport")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


def test_nothing_is_logged_by_default(cli: Callable[..., Any], factories: SimpleNamespace) -> None:
    result = cli("inspect", factories.source("masked"), "--json")
    assert result.code == 0
    assert "linexport." not in result.err


@pytest.mark.parametrize("arguments", [("-v", "inspect"), ("inspect", "-v")])
def test_decisions_are_shown(
    arguments: tuple[str, ...], cli: Callable[..., Any], factories: SimpleNamespace
) -> None:
    result = cli(*arguments, factories.source("masked"), "--json")
    assert "linexport.passes.manager: expose_past_present: " in result.err
    assert "nothing to change" not in result.err
    assert json.loads(result.out)["kind"] == "factory", "standard output is JSON alone"


@pytest.mark.parametrize("arguments", [("-vv", "inspect"), ("-v", "inspect", "--verbose")])
def test_reasons_against_are_shown(
    arguments: tuple[str, ...], cli: Callable[..., Any], factories: SimpleNamespace
) -> None:
    result = cli(*arguments, factories.source("masked"))
    assert "linexport.passes.manager: expose_past_present: " in result.err
    assert "nothing to change" in result.err


def test_a_later_command_is_quiet_again(cli: Callable[..., Any]) -> None:
    assert cli("-vv", "maps", "--json").code == 0
    assert logging.getLogger("linexport").isEnabledFor(logging.DEBUG)
    assert cli("maps", "--json").code == 0
    assert not logging.getLogger("linexport").isEnabledFor(logging.INFO)


def test_commands_of_groups_take_it_too(cli: Callable[..., Any]) -> None:
    for command in (("convert",), ("maps", "compare"), ("plugins",)):
        assert "--verbose" in cli(*command, "--help").out
