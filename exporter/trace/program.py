"""``torch.export`` of a module; a dimension the code fixes is an error that names the line."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from linexport.errors import BuildError, LinexportError, UnsupportedModelError
from linexport.models import torch_ops
from linexport.patches import applied, gpu_kernels, modeling_files
from linexport.patches.own_scans import own_scans
from linexport.patches.packages import as_ops
from linexport.patches.scans import as_loops, has_scans
from linexport.sources.first_run import buffers_kept, described
from linexport.sources.loaded_model import LoadedModel
from linexport.system.torch_internals import sizes, vmaps
from linexport.system.torch_internals.exports import LOGS, control_flow_as_it_is
from linexport.system.torch_internals.trees import pytree
from linexport.trace.branches import at_other_sizes, fails_at_others, left_by_next, where_not_fixed
from linexport.trace.dim_names import length_warnings, name_symbols
from linexport.trace.examples import Slices, shortened
from linexport.trace.exporter_state import exporting
from linexport.trace.integer_sizes import integer_sizes
from linexport.trace.loops import capture
from linexport.trace.messages import error_summary, explained
from linexport.trace.metadata import last_frame
from linexport.trace.stand_ins import StandIns

log = logging.getLogger(__name__)

TRIED: ContextVar[bool] = ContextVar("TRIED", default=False)
"""True while a model is traced with ``int`` of sizes."""

AT_OTHERS: ContextVar[bool] = ContextVar("AT_OTHERS", default=False)
"""True while a model is traced at other sizes than those of its example."""

RELATED = re.compile(r"must always be (related|equal)")
SUGGESTED = re.compile(r"^  (?P<name>\w+) = ((?P<number>\d+)\*)?(?P<root>[^\W\d]\w*)$", re.M)
"""Sentences of torch on two sizes, and the relation that it suggests to write."""


def export_program(
    loaded: LoadedModel, whole: bool = False, named: object = None
) -> torch.export.ExportedProgram:
    """Run ``torch.export`` on the module, or on the decode module that is traced in its place.

    Args:
        loaded: the model.
        whole: trace a loop over tokens to its end, though few steps of it were not enough.
        named: its dynamic shapes with names, where those that are traced have none.

    Raises:
        UnsupportedModelError, BuildError: see ``trace``.
    """
    torch_ops.register_all()
    if loaded.decode_module is None and not whole and has_scans(loaded.module):
        program = _of_few_steps(loaded)
        if program is not None:
            return program
    try:
        with capture.counted(stop=not whole and _refuses_fixed_sizes(loaded)) as counted:
            program = _export(loaded)
    except capture.LoopFoundError as loop:
        # A trace in which a loop fixes a size is not used: its steps would be those of the example.
        fixed = () if loop.number is None else (loop.number,)
        rolled = _of_few_steps(loaded, counted, fixed, alike=True)
        return rolled or export_program(loaded, whole=True)
    except LinexportError:
        raise
    except Exception as error:
        return _in_another_way(loaded, counted, error, whole, named)
    if loaded.decode_module is not None:
        return program
    rolled = _at_any_length(loaded, counted, program, named)
    if rolled is None and counted:
        raise UnsupportedModelError(_frozen_loop(counted[0]))
    return rolled or program


def _in_another_way(
    loaded: LoadedModel,
    counted: Sequence[capture.TracedCount],
    error: Exception,
    whole: bool,
    named: object,
) -> torch.export.ExportedProgram:
    """Trace a model whose code torch does not trace as it is.

    Args:
        loaded: the model.
        counted: loops that were found before.
        error: of its trace.
        whole: see ``export_program``.
        named: likewise.

    Raises:
        UnsupportedModelError: its code fixes a dimension.
        BuildError: torch fails in another way.
    """
    is_frozen = "onstraints violated" in str(error)
    if loaded.decode_module is None:
        rolled = _of_few_steps(loaded, counted, _fixed(error)) if is_frozen else None
        rolled = rolled or _of_own_scans(loaded)
        if rolled is not None:
            return rolled
    if not is_frozen:
        said = f"{explained(error)}{_user_line(error)}"
        raise BuildError(
            f"torch.export cannot trace the model: {said}{_own_failure(loaded, said)}"
        ) from error
    sized = _of_integer_sizes(loaded, whole)
    if sized is not None:
        return sized
    loose = None if counted else _related(loaded, error) or _without_names(loaded, error)
    if loose is not None:
        return export_program(loose, named=named or loaded.dynamic_shapes)
    # A loop that is traced to its end is as long at the next sizes, and fixes them as well.
    moved = None if counted or whole else _where_not_fixed(loaded, error)
    if moved is not None:
        return moved
    itself = "" if counted or whole else fails_at_others(loaded, _fixed(error))
    raise frozen(loaded, error, itself=itself) from error


def _at_any_length(
    loaded: LoadedModel,
    counted: Sequence[capture.TracedCount],
    program: torch.export.ExportedProgram,
    named: object,
) -> torch.export.ExportedProgram | None:
    """Return a program that takes more lengths than one that was traced; None without one.

    Args:
        loaded: the model.
        counted: loops that the program has unrolled.
        program: was traced.
        named: see ``export_program``.
    """
    rolled = _of_few_steps(loaded, counted) if counted else None
    if rolled is not None or not _is_limited(loaded, program):
        return rolled
    rolled = _of_few_steps(loaded) if _slices(loaded) else None
    rolled = rolled or _of_own_scans(loaded)
    if rolled is not None or counted:
        return rolled
    return at_other_sizes(loaded, program, _export, named or loaded.dynamic_shapes)


def _refuses_fixed_sizes(loaded: LoadedModel) -> bool:
    """Return whether torch refuses a trace that fixes a size; it fixes those of ``Dim.AUTO``."""
    dim, dims = torch.export.Dim, pytree.tree_leaves(loaded.dynamic_shapes)
    known = (d is None or isinstance(d, dim | int) or d in (dim.DYNAMIC, dim.STATIC) for d in dims)
    return loaded.decode_module is None and all(known)


def _of_integer_sizes(loaded: LoadedModel, whole: bool) -> torch.export.ExportedProgram | None:
    """Trace a model whose code takes ``int`` of sizes; None where it does not, or that fails."""
    if TRIED.get():
        return None
    token = TRIED.set(True)
    try:
        with integer_sizes(loaded.module) as integers:
            program = export_program(loaded, whole)
            return program if integers else None
    except Exception as error:
        log.info("the model is not traced with integers of sizes: %s", error_summary(error))
        return None
    finally:
        TRIED.reset(token)


def _where_not_fixed(loaded: LoadedModel, error: Exception) -> torch.export.ExportedProgram | None:
    """Trace a model at other sizes than those that its code compares with; None if that fails."""
    if AT_OTHERS.get():
        return None
    token = AT_OTHERS.set(True)
    try:
        return where_not_fixed(loaded, _fixed(error), export_program)
    finally:
        AT_OTHERS.reset(token)


def _related(loaded: LoadedModel, error: Exception) -> LoadedModel | None:
    """Return a model whose sizes are related as torch found them to be.

    A decoder adds an image of twice the height to its own: ``H`` of the user is ``2*h``.

    Args:
        loaded: the model.
        error: of its trace.

    Returns:
        The model; None where torch found something else as well, such as a size that is fixed.
    """
    said = [line.strip() for line in str(error).splitlines() if line.startswith("  - ")]
    if not said or not all(RELATED.search(line) for line in said):
        return None
    dims = pytree.tree_leaves(loaded.dynamic_shapes)
    own = {d.__name__: d for d in dims if isinstance(d, torch.export.Dim)}
    fixes = {
        fix["name"]: int(fix["number"]) * own[fix["root"]] if fix["number"] else own[fix["root"]]
        for fix in SUGGESTED.finditer(str(error))
        if fix["name"] in own and fix["root"] in own
    }
    log.info("sizes that follow from others: %s", {n: d.__name__ for n, d in fixes.items()})

    def fixed(dim: object) -> object:
        return fixes.get(dim.__name__, dim) if isinstance(dim, torch.export.Dim) else dim

    found = pytree.tree_map(
        fixed, loaded.dynamic_shapes, is_leaf=lambda x: isinstance(x, torch.export.Dim)
    )
    return replace(loaded, dynamic_shapes=found) if fixes else None


def _without_names(loaded: LoadedModel, error: Exception) -> LoadedModel | None:
    """Return a model whose sizes vary without a ``Dim``, where torch excludes single values alone.

    Code that compares a size, as a convolution with strides does with 1, then limits nothing: torch
    refuses such a ``Dim``, and takes the same for ``Dim.DYNAMIC``. The comparison with the original
    says whether other sizes are right.

    Args:
        loaded: the model.
        error: of its trace.

    Returns:
        The model; None where the trace carries states, fixes a size, or has no ``Dim``.
    """
    guarded, fixes = "Not all values of" in str(error), "to be a constant" in str(error)
    if loaded.decode_module is not None or not guarded or fixes:
        return None
    spec, dynamic = loaded.dynamic_shapes, torch.export.Dim.DYNAMIC

    def unnamed(dim: object) -> object:
        plain = isinstance(dim, torch.export.Dim) and "*" not in dim.__name__
        return dynamic if plain else dim

    found = pytree.tree_map(unnamed, spec, is_leaf=lambda x: isinstance(x, torch.export.Dim))
    return None if found == spec else replace(loaded, dynamic_shapes=found)


def _own_failure(loaded: LoadedModel, said: str) -> str:
    """Return how the model fails on what is traced without being traced; "" where it does not.

    It ran on the example as it was given; a batch or a sequence of 1 is repeated to 2.

    Args:
        loaded: the model.
        said: how it fails while it is traced, which is not said again.
    """
    try:
        with torch.no_grad(), buffers_kept(loaded.module):
            loaded.module(*loaded.args, **loaded.kwargs)
    except Exception as error:
        own = f"{explained(error)}{_user_line(error)}"
        given = described(loaded.module, loaded.args, loaded.kwargs)
        repeated = [f"\n{w[0].upper()}{w[1:]}." for w in loaded.warnings if "repeated" in w]
        return (
            f"\nThe model itself fails on {given}, in eager mode"
            f"{' by the same error.' if _reason(own) == _reason(said) else f': {own}'}"
            f"{''.join(repeated)}"
        )
    return ""


def _reason(error: str) -> str:
    """Return the first line of an error, without the name of its class, which torch may change."""
    return error.partition("\n")[0].partition(": ")[2]


def _is_limited(loaded: LoadedModel, program: torch.export.ExportedProgram) -> bool:
    """Return whether the model's code limits a size that nobody limited."""
    _, dims, known = name_symbols(program, loaded.dynamic_shapes)
    if length_warnings(loaded.dynamic_shapes, dims, known):
        return True
    return left_by_next(program)


def frozen(
    loaded: LoadedModel, error: Exception | None = None, reason: str = "", itself: str = ""
) -> UnsupportedModelError:
    """Return the error of a model whose code fixes a dimension, and the reason it is fixed.

    Args:
        loaded: the model.
        error: of its trace; None to trace it again.
        reason: a sentence more.
        itself: how the model itself fails at other sizes.
    """
    counted: list[capture.TracedCount] = []
    if error is None:
        try:
            with capture.counted() as counted:
                _export(loaded)
        except Exception as found:
            error = found
    if error is not None:
        message = _frozen_message(lambda: _export(loaded), error, loaded.unclear_dims, itself)
    else:
        message = _frozen_loop(counted[0]) if counted else ""
    return UnsupportedModelError("\n".join(filter(None, [message, reason])))


def _export(loaded: LoadedModel) -> torch.export.ExportedProgram:
    step = loaded.decode_module
    source, context = step or loaded, (step or loaded).patched
    patched = context() if context else _patched(loaded.module)
    given = source.dynamic_shapes
    with torch.no_grad(), exporting(), patched, StandIns(), vmaps.written_out():
        return torch.export.export(
            source.module,
            source.args,
            loaded.kwargs,
            dynamic_shapes=_by_parameter(source.module, source.args, loaded.kwargs, given),
            strict=False,
        )


@contextlib.contextmanager
def _patched(model: torch.nn.Module) -> Iterator[None]:
    """Swap functions of packages, and of layers of libraries that a model is made of."""
    files, shorter = modeling_files(model, known=True), sizes.comparing_by(_chooses_kernel)
    with applied(files), as_ops(model), shorter:
        yield


def _chooses_kernel(size: torch.SymInt, number: int, file: str) -> bool:
    """Return whether a comparison of lengths chooses between kernels that compute the same.

    A GPU library takes its recurrent kernel up to 64 tokens, say, and that in chunks above.
    """
    return number > 1 and gpu_kernels.is_of_library(file)


def _by_parameter(
    module: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    dynamic_shapes: object,
) -> Any:
    """Return an entry for each parameter of ``forward``: those of ``*args`` are one, a tuple.

    Args:
        module: what is traced.
        args: its example inputs.
        kwargs: those by name.
        dynamic_shapes: an entry for each of them, or torch's notation, which is kept.
    """
    signature = inspect.signature(module.forward)
    if not isinstance(dynamic_shapes, tuple):
        return dynamic_shapes
    if kwargs:
        count = len(args)
        named = dict(zip(kwargs, dynamic_shapes[count:], strict=True))
        return dict(signature.bind(*dynamic_shapes[:count], **named).arguments)
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return dynamic_shapes
    at = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    own, rest = dynamic_shapes[:at], dynamic_shapes[at:]
    of_several = not rest or _is_of_several(rest, len(args) - at)
    return dynamic_shapes if of_several else (*own, rest)


def _is_of_several(rest: tuple[object, ...], count: int) -> bool:
    """Return whether these are one entry that holds those of ``count`` arguments."""
    if len(rest) != 1 or not isinstance(rest[0], tuple | list) or len(rest[0]) != count:
        return False
    return all(entry is None or isinstance(entry, dict | tuple | list) for entry in rest[0])


def _fixed(error: Exception) -> tuple[int, ...]:
    """Return the sizes that torch says the code of a model fixes."""
    return tuple(map(int, re.findall(r"to be a constant \((\d+)\)", str(error))))


def _of_few_steps(
    loaded: LoadedModel,
    counted: Sequence[capture.TracedCount] = (),
    fixed: Sequence[int] = (),
    alike: bool = False,
) -> torch.export.ExportedProgram | None:
    """Trace a model with a loop over tokens at a few of them; None where that fails as well.

    Args:
        loaded: the model.
        counted: numbers of chunks that its loops were seen to count to.
        fixed: sizes that its loops count to; an example with fewer tokens is made longer.
        alike: whether a loop that counts to another number of steps is refused: no trace has told
            of it.
    """
    images = [c for c in counted if c.sides(1)]
    for grown in capture.GROWN if images else ():
        sides = {size: n for c in images for size, n in c.sides(grown).items()}
        program = _of_lengths(loaded, sides, 1, alike, images=True)
        if program is not None:
            return program
    lengths, chunk = dict(found for c in counted if (found := c.length())), 1
    sliced = None if lengths else _slices(loaded)
    if sliced is not None:
        size, chunk = sliced
        lengths = {size: capture.STEPS * chunk}
    lengths = {n: capture.STEPS for n in fixed if n < capture.STEPS} | lengths
    return _of_lengths(loaded, lengths, chunk, alike)


def _of_lengths(
    loaded: LoadedModel,
    lengths: Mapping[int, int],
    chunk: int,
    alike: bool,
    images: bool = False,
) -> torch.export.ExportedProgram | None:
    """Trace a model with a loop over tokens at other sizes; None where that fails.

    Args:
        loaded: the model.
        lengths: sizes to use in place of those of the examples; see ``shortened``.
        chunk: tokens of a step.
        alike: see ``_of_few_steps``.
        images: whether steps are the pixels of images, of which there are more than ``STEPS``.
    """
    given = shortened((*loaded.args, *loaded.kwargs.values()), loaded.dynamic_shapes, lengths)
    if given is None:
        return None
    examples, dynamic_shapes = given
    args, named = examples[: len(loaded.args)], examples[len(loaded.args) :]
    kwargs = dict(zip(loaded.kwargs, named, strict=True))
    short = replace(loaded, args=args, kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    try:
        # ``int`` of a size is a size: only what counts to one has the number of the example.
        integers, few = integer_sizes(loaded.module), capture.few_steps(chunk)
        with integers, few as marks, as_loops(loaded.module):
            program = _export(short)
    except Exception as error:
        log.info("the loop cannot be traced for a few steps: %s", error_summary(error))
        return None
    if (alike or images) and not marks.counts_alike(least=images):
        return None
    marked = any(node.target is capture.OPERATOR for node in program.graph.nodes)
    if not marked and not marks.positions:
        return None
    # The trace of seven steps fixed the lower bound of seven tokens.
    for size in program.range_constraints:
        limits = program.range_constraints[size]
        program.range_constraints[size] = type(limits)(2, limits.upper)
    return program


def _slices(loaded: LoadedModel) -> tuple[int, int] | None:
    """Return a dynamic size that a model cuts to slices of one width, and the width."""
    flat, _ = pytree.tree_flatten((loaded.args, loaded.kwargs))
    lengths = {n for x in flat if isinstance(x, torch.Tensor) for n in x.shape[1:]}
    try:
        plain = control_flow_as_it_is()
        with torch.no_grad(), plain, buffers_kept(loaded.module), Slices() as found:
            loaded.module(*loaded.args, **loaded.kwargs)
    except Exception as error:
        log.info("slices of the model were not looked for: %s", error_summary(error))
        return None
    return found.chunk(lengths)


def _of_own_scans(loaded: LoadedModel) -> torch.export.ExportedProgram | None:
    """Trace a model whose functions compute recurrences as loops; None where none does."""
    try:
        kept = buffers_kept(loaded.module)
        with kept, own_scans(loaded.module, loaded.args, loaded.kwargs) as count:
            return _of_few_steps(loaded) if count else None
    except Exception as error:
        log.info("scans of the model were not looked for: %s", error_summary(error))
        return None


class _FreezeProbe(logging.Handler):
    """Record of the model's lines that were running when torch fixed a size symbol.

    torch logs each decision about a symbol while the code that asks for it is still on the stack.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "set_replacement" in record.getMessage():
            frame = _innermost_user_frame(traceback.extract_stack())
            if frame:
                self.lines.append(f"{frame.filename}:{frame.lineno}: {frame.line}")


def _frozen_message(
    export: Callable[[], object], error: Exception, unclear: Sequence[str], itself: str
) -> str:
    log = logging.getLogger(LOGS["sizes"])
    probe, saved = _FreezeProbe(), (log.handlers, log.level, log.propagate)
    log.handlers, log.propagate = [probe], False
    log.setLevel(logging.INFO)
    try:
        with contextlib.suppress(Exception):
            export()
    finally:
        log.handlers, log.propagate = saved[0], saved[2]
        log.setLevel(saved[1])
    detail = re.search(r"- (.*?specialized it to be a constant \(\d+\))", str(error))
    detail = detail or re.search(r"- (Not all values of .*)", str(error))
    what = detail.group(1) if detail else error_summary(error)
    return _frozen_text(what, probe.lines, unclear, itself)


def _frozen_loop(counted: capture.TracedCount) -> str:
    """Return the message on a loop over chunks, of which torch says nothing."""
    frame = _innermost_user_frame(counted.stack)
    message = _frozen_text(
        f"a loop, or another number, counts to {counted.steps}, of which the export keeps what it "
        f"is for the example ({counted.number})",
        [f"{frame.filename}:{frame.lineno}: {frame.line}"] if frame else [],
    )
    return (
        f"{message}\nA loop over chunks of C tokens is converted where all of its steps are alike "
        'and all tokens are in whole chunks: C * torch.export.Dim("n") in dynamic_shapes says so.'
    )


def _frozen_text(
    what: str, lines: Sequence[str], unclear: Sequence[str] = (), itself: str = ""
) -> str:
    where = "".join(f"\n  {line}" for line in dict.fromkeys(lines))
    message = (
        "The export would freeze a dimension that should be dynamic: "
        f"{what}.\nFixed by:{where or ' (torch does not say which line)'}\n"
    )
    if unclear:
        return f"{message}{'; '.join(unclear)}."
    if itself:
        return (
            f"{message}The model itself fails at others, {itself}. Compute its sizes from the "
            "shapes of inputs, as x.shape[2], or leave the dimension out: give it no name in "
            "--input, or no entry in dynamic_shapes."
        )
    return message + (
        "A Python loop over tokens or chunks, a table of one length, or int(x.shape[1]) does "
        "this. Use linexport.models.functional.linear_attention for the recurrence, index tables "
        "by the length, or leave the dimension out of dynamic_shapes if it is meant to be fixed."
    )


def _innermost_user_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the last frame outside torch, the interpreter's library and this folder."""
    library = (str(Path(torch.__file__).parent), str(Path(logging.__file__).parent.parent))
    for frame in reversed(frames):
        inside = frame.filename.startswith(library) and "site-packages" not in frame.filename
        in_torch = frame.filename.startswith(library[0])
        own = Path(frame.filename).is_relative_to(Path(__file__).parent)
        if not (inside or in_torch or own or frame.filename == "<string>"):
            return frame
    return None


def _user_line(error: BaseException) -> str:
    last = last_frame(str(error))
    if last is not None:  # behind the line that is left in the traceback, torch ran the code
        return f"\nAt {last['path']}:{last['line']}: {last['code'].strip()}"
    frame = _innermost_user_frame(traceback.extract_tb(error.__traceback__))
    return f"\nAt {frame.filename}:{frame.lineno}: {frame.line}" if frame else ""
