"""A module run as it is, on the inputs that it comes with, before anything else is done with it.

Buffers that it writes have their values again afterwards: the module is as the user gave it.
"""

from __future__ import annotations

import inspect
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from linexport.errors import UnsupportedModelError
from linexport.sources.callables import user_frame
from linexport.sources.compiled_extensions import compilation_failure
from linexport.sources.files import first_line
from linexport.sources.gpu_failures import gpu_failure
from linexport.sources.kept_inputs import copies, write_count, write_counts_of
from linexport.sources.own_trees import check_outputs
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

LISTED = 6
"""Inputs that are described in an error."""


@dataclass(frozen=True)
class Writes:
    """Names of what a call of a module has written to.

    Attributes:
        buffers: registered buffers.
        parameters: parameters.
        attributes: attributes of a module that are neither.
        inputs: whether a tensor that it was given is among it.
    """

    buffers: tuple[str, ...]
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]
    inputs: bool = False


def run_once(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], name: str
) -> Writes:
    """Run a module on its own example, and return what that writes.

    Args:
        module: in evaluation mode.
        args: example inputs.
        kwargs: those by name.
        name: what the user calls the model.

    Raises:
        UnsupportedModelError: it fails, with the line of the user's code; it keeps something from
            one call to the next that is not a buffer; or it returns an unknown class.
    """
    try:
        before, random = _Values(module), torch.get_rng_state()
        given = copies((args, kwargs))
        versions = write_counts_of(given)
        with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module):
            first = module(*given[0], **given[1])
            written = replace(before.written(module), inputs=write_counts_of(given) != versions)
            check_outputs(first, name)
            first = copies(first)
        draws = not torch.equal(random, torch.get_rng_state())
        if written.attributes and not draws:
            given = copies((args, kwargs))
            with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module):
                second = module(*given[0], **given[1])
                _check_alike(first, second, written, name)
    except UnsupportedModelError:
        raise
    except Exception as error:
        example = described(module, args, kwargs)
        raise failure(error, name, f"its example inputs, {example}") from error
    if written.parameters:
        raise UnsupportedModelError(
            f"{name}: forward writes the parameter {written.parameters[0]}. What a call leaves to "
            "the next one has to be in a buffer (register_buffer): it becomes a state."
        )
    return written


def _check_alike(first: object, second: object, written: Writes, name: str) -> None:
    """Check that a second call gives what the first one gave.

    Raises:
        UnsupportedModelError: it does not, though buffers had the same values.
    """
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=False)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in tensors
    ):
        return
    raise UnsupportedModelError(
        f"{name}: a second call on the same inputs gives other outputs, and forward writes "
        f"{', '.join(f'self.{a}' for a in written.attributes[:LISTED])}, which is not a buffer. "
        "Register what a call leaves to the next one with register_buffer: it becomes a state."
    )


class _Values:
    """Values that a module has before a call.

    Args:
        module: it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = {n: (b, write_count(b), b.detach().clone()) for n, b in _buffers(module)}
        self._parameters = {n: write_count(p) for n, p in _parameters(module)}
        self._attributes = dict(_attributes(module))

    def written(self, module: nn.Module) -> Writes:
        """Return what the module has written since."""
        return Writes(
            tuple(n for n, b in _buffers(module) if self._is_written(n, b)),
            tuple(
                n
                for n, p in _parameters(module)
                if self._parameters.get(n, write_count(p)) != write_count(p)
            ),
            tuple(n for n, x in _attributes(module) if self._attributes.get(n) != x),
        )

    def _is_written(self, name: str, now: Tensor) -> bool:
        if name not in self._buffers:
            return True
        before, version, values = self._buffers[name]
        if now is not before or write_count(now) != version or now.shape != values.shape:
            return True
        return not torch.equal(now, values)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, b) for n, b in module.named_buffers() if not is_lazy(b)]


def _parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, p) for n, p in module.named_parameters() if not is_lazy(p)]


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield attributes of a module and its parts with what tells one value from another."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                mark: Any = (id(value), write_count(value))
            elif isinstance(value, list | tuple | deque):
                mark = tuple(map(id, value))
            elif isinstance(value, dict):
                mark = tuple((k, id(v)) for k, v in value.items())
            elif value is None or isinstance(value, int | float | str):
                mark = value
            else:
                continue
            if not (key.startswith("_") and key in NOT_OWN):
                yield f"{name}.{key}".removeprefix("."), mark


NOT_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def failure(error: Exception, name: str, inputs: str) -> UnsupportedModelError:
    """Return the error of a model that fails as it is, with the line of the user's code.

    Args:
        error: what it raised.
        name: what the user calls the model.
        inputs: what it was run on.
    """
    said, frame = first_line(error).rstrip("."), user_frame(error.__traceback__)
    advice = "Correct the model or its inputs: module(*args, **kwargs) must run."
    needs_gpu = gpu_failure(error)
    if needs_gpu is not None:
        said, advice = needs_gpu
    if isinstance(error, NotImplementedError) and not str(error):
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = (
            f"{last.name} in {Path(last.filename).name}:{last.lineno} raises NotImplementedError, "
            "without a reason: its author has not written what these options or sizes take. Give "
            "the layer others, such as another mode"
        )
    compiled = compilation_failure(error, f" at {frame.filename}:{frame.lineno}" if frame else "")
    if compiled is not None:
        return compiled
    place = f" at {frame.filename}:{frame.lineno} ({frame.line})" if frame else ""
    return UnsupportedModelError(
        f"{name}: the model itself fails{place}: {said}. It was run on {inputs}. {advice}"
    )


def said_where(error: BaseException) -> str:
    """Return the first line of what a model raised, and the line of the user's code."""
    frame = user_frame(error.__traceback__)
    said = next(filter(None, str(error).splitlines()), type(error).__name__).strip()
    # The place may be kept in an artifact, where local folders do not belong.
    place = f", at {Path(frame.filename).name}:{frame.lineno}: {frame.line}" if frame else ""
    return f"{said}{place}"


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Give the buffers of a module the values again that they had before."""
    saved = [
        (part, key, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for key, buffer in part._buffers.items()
        if buffer is None or not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        for part, key, buffer, values in saved:
            if buffer is not None and values is not None and not torch.equal(buffer, values):
                buffer.data = values
            part._buffers[key] = buffer


def outputs_on(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Tensor] | None:
    """Return the tensors that a module gives for inputs; None where it does not take them."""
    try:
        with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module):
            found = module(*args, **kwargs)
    except Exception:
        return None
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def first_rows(examples: object) -> int:
    """Return the batch of examples: the first size of the first tensor."""
    leaves = (x for x in pytree.tree_leaves(examples) if isinstance(x, Tensor) and x.dim())
    return next((x.shape[0] for x in leaves), 1)


class TableRows(TorchFunctionMode):
    """Notes how many rows the tables have that inputs index, by the number of the input.

    Args:
        examples: args and kwargs.
    """

    def __init__(self, examples: Any) -> None:
        super().__init__()
        self.ranges: dict[int, tuple[int, int]] = {}
        self._places = {id(leaf): n for n, leaf in enumerate(pytree.tree_leaves(examples))}

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """Run ``func``."""
        if func is nn.functional.embedding and len(args) >= 2:
            ids, table = args[:2]
            if id(ids) in self._places:
                place = self._places[id(ids)]
                rows = min(table.shape[0], self.ranges.get(place, (0, table.shape[0]))[1])
                self.ranges[place] = (0, rows)
        return func(*args, **(kwargs or {}))


def table_rows(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[int, tuple[int, int]]:
    """Return the half-open ranges of inputs that index tables, by the number of the input."""
    seen = TableRows((args, kwargs))
    try:
        with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module), seen:
            module(*args, **kwargs)
    except Exception:  # tracing says what is wrong with these examples
        return {}
    return seen.ranges


def described(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the tensors among inputs in words: "ids (2, 16) int64 from 100 to 199"."""
    try:
        given = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # that it takes other ones may be what is wrong
        given = {**{f"argument {n}": x for n, x in enumerate(args)}, **kwargs}
    found = [
        f"{name} {_tensor(leaf)}"
        for name, value in given.items()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
    more = f" and {len(found) - LISTED} more tensors" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more


def _tensor(value: Tensor) -> str:
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return f"{text} from {int(value.min())} to {int(value.max())}" if whole and len(value) else text
