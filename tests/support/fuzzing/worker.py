"""The worker process: attempts cases one after another, under a limit of address space.

A line ``kind seed index`` on standard input is answered by a line of JSON: outcome, where, detail.
Whatever else is printed meanwhile goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import traceback
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace

from linexport.errors import LinexportError

OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|DefaultCPUAllocator|[Uu]nable to allocate|[Cc]annot allocate memory"
)
ROOTS = ("/linexport/", "/exporter/", "/models/", "/plugins/")


def attempt(kind: str, seed: int, index: int, folder: Path, memory: int) -> dict[str, str]:
    """Attempt one case.

    Returns:
        ``outcome``; of failures also ``where`` and ``detail``.
    """
    from tests.support.fuzzing.kinds import KINDS

    random = Random(f"{kind} {seed} {index}")
    with mutated(kind, random, folder) as sample, limited(memory):
        try:
            return {"outcome": KINDS[kind].attempt(sample, random)}
        except LinexportError as error:
            if any(OUT_OF_MEMORY.search(f"{type(e).__name__}: {e}") for e in chain(error)):
                return {"outcome": "memory", "where": place(chain(error)[-1]), "detail": str(error)}
            return {"outcome": "refused"}
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            outcome = "memory" if OUT_OF_MEMORY.search(said) else "traceback"
            trace = "".join(traceback.format_exception(error))
            return {
                "outcome": outcome,
                "where": f"{type(error).__name__} at {place(error)}",
                "detail": said[:300],
                "trace": trace[-6000:],
            }


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and those that led to it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def place(error: BaseException) -> str:
    """Return the innermost line of linexport in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if any(root in f.filename for root in ROOTS) and "site-packages" not in f.filename
    ]
    last = (own or frames)[-1] if frames else None
    return (
        f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"
        if last
        else "?"
    )


@contextmanager
def limited(memory: int) -> Iterator[None]:
    """Let address space grow by ``memory`` bytes at most."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


@contextmanager
def mutated(kind: str, random: Random, folder: Path) -> Iterator[Path]:
    """Yield a copy of a sample in which one file is mutated; prepare samples the first time."""
    from tests.support.fuzzing.kinds import KINDS

    chosen = KINDS[kind]
    place = chosen.samples(folder)
    valid, copies = place / "valid", place / f"copies_{os.getpid()}"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        valid.mkdir(parents=True)
        chosen.prepare(valid)
        (place / "complete").touch()
    if not copies.exists():
        shutil.copytree(valid, copies, copy_function=os.link)
    sample = copies / random.choice(sorted(p.name for p in copies.iterdir()))
    files = [
        (f, change) for name, change in chosen.mutations.items() for f in sorted(sample.glob(name))
    ]
    if not files:
        yield sample
        return
    path, change = random.choice(files)
    original = (valid / path.relative_to(copies)).read_bytes()
    path.unlink()
    path.write_bytes(change(random, original))
    try:
        yield sample
    finally:
        path.unlink()
        os.link(valid / path.relative_to(copies), path)


def quicken() -> None:
    """Keep what libraries compute anew for every case and always alike.

    PyTorch asks for the types of its records' fields whenever it reads a program (a third of a
    case), and its exporter lists its translations for every export (a tenth).
    """
    from torch._export.serde import serialize
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    @cache
    def hints(kind: type) -> dict[str, object]:
        return typing.get_type_hints(kind, globalns=vars(serialize.schema))

    own = SimpleNamespace(**vars(typing))
    own.get_type_hints = lambda kind, globalns: hints(kind)
    serialize.typing = own  # type: ignore[attr-defined]
    listed = cache(ONNXRegistry.from_torchlib)
    ONNXRegistry.from_torchlib = staticmethod(  # type: ignore[method-assign]
        lambda opset_version=TORCHLIB_OPSET: listed(opset_version)
    )


def main() -> None:
    """Answer every line of standard input."""
    folder, memory = Path(sys.argv[1]), int(sys.argv[2])
    quicken()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        kind, seed, index = line.split()
        answer = attempt(kind, int(seed), int(index), folder, memory)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
