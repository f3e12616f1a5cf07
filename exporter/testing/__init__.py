"""A pytest plugin: parity of a PyTorch module and its conversion, as a test.

    def test_export(linexport_parity):
        linexport_parity(MyModel(), (torch.randn(2, 16, 64),), lengths=(1, 100), streaming=True)

A test that uses the fixture has the marker ``linexport_parity``, so that ``-m "not
linexport_parity"`` leaves it out. Given by hand, the marker has defaults of the fixture's keywords.
Nothing of linexport but this file is imported before a test uses the fixture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from linexport.manifest import Manifest

NAME = "linexport_parity"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{NAME}(lengths, batch, tolerance, streaming): defaults of the fixture {NAME}, which "
        "converts a module and compares it with the original.",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the fixture."""
    for item in items:
        if NAME in getattr(item, "fixturenames", ()) and not item.get_closest_marker(NAME):
            item.add_marker(NAME)


@pytest.fixture
def linexport_parity(request: pytest.FixtureRequest, tmp_path: Path) -> ParityTest:
    """Return a function that converts a module and fails the test unless the two are equal."""
    marker = request.node.get_closest_marker(NAME)
    return ParityTest(tmp_path, marker.kwargs if marker else {})


@contextmanager
def _without_traces_of_torch() -> Iterator[None]:
    """Keep torch's structured traces out of pytest's report: messages without a text."""
    logger = logging.getLogger("torch.__trace")
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before


@dataclass
class ParityTest:
    """The fixture's value.

    Attributes:
        folder: artifacts are written below it.
        defaults: keywords of the marker.
        count: artifacts that were written.
    """

    folder: Path
    defaults: dict[str, object]
    count: int = 0

    def __call__(
        self,
        model: torch.nn.Module,
        args: tuple[object, ...],
        *,
        kwargs: Mapping[str, object] | None = None,
        dynamic_shapes: object = None,
        lengths: Sequence[int] | None = None,
        batch: int | Sequence[int] | None = None,
        tolerance: float | None = None,
        streaming: bool | None = None,
        target: str | None = None,
    ) -> Manifest:
        """Convert a module and fail the test unless the artifact equals it.

        Args:
            model: the module, with the weights to test; a copy of it is converted, in evaluation
                mode.
            args: example arguments, a tuple.
            kwargs: those by name.
            dynamic_shapes: in torch.export's notation; None: batch and sequence, as ``convert``
                chooses.
            lengths: of sequences to compare at; None for those of ``convert``, which include 1, one
                that was never traced and one above 4,096.
            batch: sizes to compare at; None for 1 and 3.
            tolerance: largest difference allowed, relative to the largest output; None for that of
                the precision, 5e-5 in float32.
            streaming: the artifact must stream, equal in pieces to what it is whole.
            target: as ``convert`` takes it; "ort" where nothing says otherwise.

        Returns:
            The artifact's manifest; its folder is ``manifest.artifact``.

        Raises:
            pytest.fail.Exception: they differ; with the first layer, token and state that do.
            UsageError: arguments that nobody could convert.
        """
        from linexport.testing.comparison import ExpectedParity, problems

        own = {
            "lengths": lengths,
            "batch": batch,
            "tolerance": tolerance,
            "streaming": streaming,
            "target": target,
        }
        expected = ExpectedParity.of(
            {**self.defaults, **{n: x for n, x in own.items() if x is not None}}
        )
        self.count += 1
        place = self.folder / f"artifact-{self.count}"
        result: tuple[Any, ...] = (model, args) if kwargs is None else (model, args, kwargs)
        if dynamic_shapes is not None:
            result = (model, args, kwargs, dynamic_shapes)
        with _without_traces_of_torch():
            manifest, found = problems(result, place, expected)
        if found:
            pytest.fail("\n".join(found), pytrace=False)
        return manifest
