"""Differences between an artifact and its original, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from linexport.system.json_object import JsonObject

Verdict = Literal["own error", "inherited error", "differs before conversion"]


@dataclass(frozen=True)
class StateFinding:
    """The first state that differs.

    Attributes:
        name: of the output that holds it.
        node: that computes it.
        max_relative_error: its largest error.
        beside: what it was compared with.
        token: after which the error appears, where that was found out.
    """

    name: str
    node: str
    max_relative_error: float
    beside: str
    token: int | None = None


@dataclass(frozen=True)
class ValueFinding:
    """The first value that differs.

    Attributes:
        tensor: its name in the artifact's graph.
        node: the node that computes it.
        op: type of that node.
        layer: submodule of the original that computes it; None where nothing says so.
        module: class of that submodule.
        code: line of Python that computes it.
        row: first sequence of the batch in which it differs; None without a token axis.
        token: first token at which it differs; None without a token axis.
        max_relative_error: its largest error.
        own_error: largest error of the node alone, fed with the original's inputs of it.
        verdict: "own error" where the node is wrong of right inputs, "inherited error" where it
            passes on small errors of its inputs, "differs before conversion" where the traced
            program is not the original already.
        runs: how often the artifact was run to find it.
        probed: values that were compared.
    """

    tensor: str
    node: str
    op: str
    layer: str | None
    module: str | None
    code: str | None
    row: int | None
    token: int | None
    max_relative_error: float
    own_error: float | None
    verdict: Verdict
    runs: int
    probed: int


@dataclass(frozen=True)
class Differences:
    """Outcome of a search.

    Attributes:
        artifact: its folder.
        sizes: of the dynamic dimensions of the inputs it was run on.
        seed: of those inputs.
        tolerance: relative error that is allowed.
        value: the first value that differs; None where no output does.
        state: the first state that differs; None where none does.
        repro: folder that repeats it; None where none was written.
    """

    artifact: str
    sizes: dict[str, int]
    seed: int
    tolerance: float
    value: ValueFinding | None
    state: StateFinding | None
    repro: str | None = None

    @property
    def differs(self) -> bool:
        """Return whether anything was found."""
        return self.value is not None or self.state is not None

    def json(self) -> JsonObject:
        """Return everything as plain data."""
        return {"status": "parity_failed" if self.differs else "ok", **asdict(self)}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield topics and what there is to say of them."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        yield "inputs", f"{sizes or 'as in the example'}, seed {self.seed}"
        if not self.differs:
            yield "result", f"no output or state differs by more than {self.tolerance:.0e}"
        if self.value is not None:
            yield from _value_lines(self.value)
        if self.state is not None:
            state = self.state
            after = "" if state.token is None else f" after token {state.token}"
            yield (
                "first state",
                f"{state.name}{after}, computed by {state.node}: relative error "
                f"{state.max_relative_error:.1e} against {state.beside}",
            )
        if self.repro is not None:
            yield "repeat it", f"python {self.repro}/run.py"


def _value_lines(value: ValueFinding) -> Iterator[tuple[str, str]]:
    layer = value.layer or ("the model itself" if value.layer == "" else "not known")
    yield "first layer", f"{layer} ({value.module})" if value.module else layer
    if value.token is not None:
        yield "first token", f"{value.token} of row {value.row}"
    yield "first value", f"{value.tensor}, computed by {value.op} {value.node}"
    if value.code:
        yield "in PyTorch", value.code
    own = "not known" if value.own_error is None else f"{value.own_error:.1e}"
    yield (
        "error",
        f"{value.max_relative_error:.1e}; of the node alone, with the original's inputs: {own} "
        f"({value.verdict})",
    )
    yield "effort", f"{value.runs} runs, {value.probed} values compared"
