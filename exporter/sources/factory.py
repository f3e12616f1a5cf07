"""``package.module:callable`` becomes a LoadedModel: the user's own code builds the model.

A class gives a module, whose example inputs are drawn as ``--input`` says. A function takes no
arguments and returns a module, too, or one of

    (module, args)                              positional example inputs
    (module, args, kwargs)                      and those by name: a dict with a tensor in it
    (module, args, dynamic_shapes)              in torch.export's notation
    (module, args, kwargs, dynamic_shapes)

Without dynamic_shapes `default_dims` chooses; None in their place means that nothing varies.
Weights of a file are data. This runs the user's code, as asked; what it prints goes to stderr.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.manifest.records import KernelRecord
from linexport.patches import gpu_kernels
from linexport.patches.gpu_kernels import absent, wkv
from linexport.patches.gpu_kernels.on_cpu import keep_on_the_cpu
from linexport.patches.gpu_kernels.refused import refuse_layers
from linexport.sources import example_inputs
from linexport.sources.callables import find_callable, user_code, without_arguments
from linexport.sources.default_dims import DefaultDims, Runs, default_dims, repeat_ones_where
from linexport.sources.hugging_face import import_model, is_language_model, is_of_transformers
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.sources.own_classes import command_with_inputs, example_of
from linexport.sources.tied_dims import tied
from linexport.sources.weights import check_finite, named_tensors, parameter_summary, weights_digest
from linexport.system.untyped import DynamicShapes, Keywords, LibraryObject, Positional

if TYPE_CHECKING:
    from torch import Tensor

    from linexport.sources.carried_buffers import Buffer

_RETURNS = (
    "It must return (module, args), (module, args, kwargs), (module, args, dynamic_shapes) or "
    "(module, args, kwargs, dynamic_shapes)"
)

INPUTS_WRITTEN = (
    "forward writes to tensors that it is given. The artifact leaves its inputs as they are: take "
    "the new values from its outputs, and have forward return them if it does not."
)

UNLIKE = 1e-3
"""Difference of a kernel's stand-in from the library's reference that is no rounding."""

RANDOM_WEIGHTS = (
    "the weights are those that the class begins with: --state-dict FILE gives it trained ones"
)


def load_factory(
    source: str,
    *,
    seed: int,
    whole: bool = False,
    state_dict: str | Path | None = None,
    inputs: Iterable[str] = (),
    examples: tuple[Tensor, ...] = (),
    stand_ins: bool = False,
) -> LoadedModel:
    """Call the function or class that `source` names.

    Args:
        source: ``package.module:callable``, or ``file.py:Class(argument=1)``.
        seed: of torch's generator while the function runs, so that its random weights and inputs
            are the same every time, and of inputs that are drawn.
        whole: a model of transformers as one plain module; see ``load_model``.
        state_dict: file of weights for the module.
        inputs: example inputs of a module that comes without any; see ``example_inputs``.
        examples: tensors that such a module runs on, in order, where ``inputs`` are not given.
        stand_ins: make packages of GPU libraries that are not installed; see ``absent``.

    Returns:
        The module in eval mode with its examples. Examples of size 1 in dims chosen here are
        repeated to 2, and a warning says so. A language model of transformers is taken as one,
        whatever its examples.

    Raises:
        UsageError: `source` is misspelt, cannot be imported, fails, or returns something else; or
            weights or inputs do not fit it.
    """
    import torch

    given = example_inputs.parse(inputs)
    made = absent.KNOWN if stand_ins else absent.needed()
    extensions: set[str] = set()
    with ExitStack() as stack:
        if stand_ins:
            extensions = stack.enter_context(wkv.compiled_in_pytorch())
        factory, result, missed = _built(source, seed, made)
    result = _uncompiled(result)
    module = result[0] if isinstance(result, tuple) and result else result
    if extensions and isinstance(module, torch.nn.Module) and not torch.cuda.is_available():
        keep_on_the_cpu(module)
    if state_dict is not None and isinstance(module, torch.nn.Module):
        from linexport.sources.state_dicts import load_weights

        load_weights(module, state_dict, source)
    if not isinstance(result, torch.nn.Module):
        if given and isinstance(result, tuple):
            raise UsageError(
                f"{source} returns example inputs with its module. Leave out --input, or return "
                "the module alone."
            )
        with _saying(missed):
            return load_module(result, source, whole=whole)
    given_model, ranges = _with_inputs(result.eval(), given, examples, source, seed, state_dict)
    with _saying(missed):
        loaded = load_module(given_model, source, whole=whole)
    if state_dict is None and isinstance(getattr(factory, "func", factory), type):
        loaded = replace(loaded, warnings=(*loaded.warnings, RANDOM_WEIGHTS))
    return replace(
        loaded,
        integer_ranges={**loaded.integer_ranges, **ranges},
        places=example_inputs.places(loaded.module, given) if given else {},
    )


def _built(
    source: str, seed: int, made: Collection[str]
) -> tuple[Callable[..., Any], Any, Collection[str]]:
    """Return the function or class that a source names, what it gives, and packages that lack.

    Args:
        source: as above.
        seed: of random numbers.
        made: packages of GPU libraries, and their extensions, that are made where they lack.

    Raises:
        UsageError: see ``load_factory``.
    """
    use = "a class of a module, or a function that returns (module, args)"
    from linexport.sources.half_precision import gpu_regions_noted

    with absent.standing_in(made) as missed, gpu_regions_noted():
        try:
            factory = find_callable(source, use)
            return factory, call(factory, source, seed), missed
        except UsageError as error:
            if not missed:
                raise
            failed = error
    if missed <= absent.EXTENSIONS:  # of which none is published for a machine without a GPU
        return _built(source, seed, {*made, *missed})
    with _saying(missed):
        raise failed


def _uncompiled(result: Any) -> Any:
    """Return what a factory gave with the module that was compiled, where one was."""
    import torch

    from linexport.system.torch_internals.compiled import uncompiled

    if isinstance(result, torch.nn.Module):
        return uncompiled(result)
    if isinstance(result, tuple) and result and isinstance(result[0], torch.nn.Module):
        return uncompiled(result[0]), *result[1:]
    return result


@contextmanager
def _saying(missed: Collection[str]) -> Iterator[None]:
    """Add to an error what to do where a model's code looked for GPU libraries in vain."""
    try:
        yield
    except (UsageError, UnsupportedModelError) as error:
        if not missed:
            raise
        raise type(error)(
            f"{error}\nIts code imports {', '.join(sorted(missed))}, which is not installed: "
            "--stand-ins computes kernels of GPU libraries in PyTorch."
        ) from error


def call(factory: Callable[[], object], name: str, seed: int) -> Any:
    """Return what a factory returns, with random numbers of a seed.

    Raises:
        UsageError: it fails, or takes arguments that have no default.
    """
    import torch

    _check_arguments(factory, name)
    with torch.random.fork_rng(devices=[]), user_code(f"{name} failed"):
        torch.manual_seed(seed)
        return factory()


def _check_arguments(factory: Callable[[], Any], name: str) -> None:
    """Check that a function can be called as it is named.

    Raises:
        UsageError: it takes others.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of a class in C
        return
    try:
        signature.bind()
    except TypeError as error:
        needed = _required(factory)
        given = ", ".join(example_of(one, *_annotated(factory, one)) for one in needed)
        raise UsageError(
            f"{name} is not called so: {error}. Give it values, as in "
            f"'{without_arguments(name)}({given})', or name a function without arguments that "
            "returns the module."
        ) from None


def _annotated(factory: Callable[[], Any], argument: str) -> tuple[str, dict[str, list[str]]]:
    """Return the name of an argument's type, and what classes of its module are called with."""
    import torch

    function = getattr(factory, "func", factory)
    annotation = inspect.signature(function).parameters[argument].annotation
    module = sys.modules.get(getattr(function, "__module__", ""))
    classes = {
        name: _required(value)
        for name, value in vars(module).items()
        if isinstance(value, type) and not issubclass(value, torch.nn.Module)
    }
    return getattr(annotation, "__name__", str(annotation)), classes


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the parameters without a default; none of what has no signature."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a class in C
        return []
    return [p.name for p in found if p.default is p.empty and p.kind not in variable]


def _with_inputs(
    module: Any,
    given: list[example_inputs.ExampleInput],
    examples: tuple[Tensor, ...],
    source: str,
    seed: int,
    state_dict: str | Path | None,
) -> tuple[tuple[Any, ...], dict[int, tuple[int, int]]]:
    """Return a module with example inputs, and the ranges of integers among them.

    Raises:
        UsageError: there are none, or they do not fit the module.
    """
    if given:
        args, kwargs, ranges = example_inputs.drawn(module, given, seed, source)
        varying = example_inputs.dynamic_shapes(module, given)
        if varying is not None:
            return (module, args, kwargs, varying), ranges
        return (module, args, kwargs) if kwargs else (module, args), ranges
    if is_language_model(module):  # it says itself how it is called
        return (module, ()), {}
    if examples:
        return (module, examples), {}
    needed = example_inputs.needed(module) or ["x"]
    shapes = {name: tuple(value.shape) for name, value in named_tensors(module)}
    parts = (type(part).__name__ for part in module.modules() if [*part.parameters(recurse=False)])
    command = command_with_inputs(source, state_dict, needed, shapes, next(parts, ""))
    raise UsageError(
        f"{source} is a module, and nothing says what its forward takes. Give the type and the "
        f"sizes of an example for each input:{command}."
    )


def load_module(result: object, location: str, *, whole: bool = False) -> LoadedModel:
    """Return a module with its examples as a model.

    Args:
        result: as a factory returns it, see above.
        location: what the model is called.
        whole: see ``load_factory``.

    Raises:
        UsageError: `result` is something else.
        UnsupportedModelError: the module fails on its example, or has weights that are NaN or
            infinite.
    """
    from linexport.sources.carrying import carrying
    from linexport.sources.first_run import failure, outputs_on, run_once, table_rows
    from linexport.sources.half_precision import widened
    from linexport.sources.kept_inputs import keep_inputs
    from linexport.sources.own_trees import register_dataclasses

    register_dataclasses(result)
    given = _unpack(location, result)
    module = given.module.eval()
    warnings = _frozen_draws(module)
    origin = Source(
        kind="factory",
        location=location,
        sha256=None,
        description=parameter_summary(type(module).__name__, module),
        weights_sha256=weights_digest(module),
    )
    if whole and is_of_transformers(module):
        from linexport.sources.hugging_face import whole as plain

        return plain.whole(module.float(), origin)
    if is_language_model(module):  # it says itself how it is called
        try:
            return import_model(module.float(), origin)
        except LinexportError:
            raise
        except Exception as error:
            raise failure(error, location, "token ids, whole and in pieces with a cache") from error
    check_finite(named_tensors(module), location)
    refuse_layers(module)
    gpu_kernels.install(module)
    with gpu_kernels.recorded() as kernels:
        written = run_once(module, given.args, given.kwargs, location)
    if written.inputs:
        keep_inputs(module)
        warnings = (*warnings, INPUTS_WRITTEN)
    buffers, one_batch = _carried(given, written.buffers, location)
    chosen = _dims(given, lambda examples: outputs_on(module, *given.split(examples)), one_batch)
    args, kwargs = given.split(chosen.args)
    args, kwargs, as_given, changed = widened(module, args, kwargs)
    loaded = LoadedModel(
        module=module,
        args=args,
        kwargs=kwargs,
        dynamic_shapes=chosen.dynamic_shapes,
        source=origin,
        integer_ranges=table_rows(module, args, kwargs),
        warnings=(*chosen.warnings, *warnings, *changed, *_unlike(kernels.values())),
        unclear_dims=chosen.unclear,
        kernels=tuple(kernels.values()),
        given=as_given,
    )
    return carrying(loaded, buffers) if buffers else loaded


def _unlike(kernels: Iterable[KernelRecord]) -> tuple[str, ...]:
    """Warn of kernels whose stand-in is not what the library's own reference computes."""
    return tuple(
        f"{one.name} was stood in for by PyTorch, which differs from {one.reference} by "
        f"{one.error:.1e} of the largest value: the artifact was compared with the stand-in."
        for one in kernels
        if one.error is not None and one.error > UNLIKE
    )


def _carried(
    given: _Given, names: tuple[str, ...], location: str
) -> tuple[tuple[Buffer, ...], str | None]:
    """Return the buffers that the module writes, and why its batch does not vary.

    The module then begins every call with the values that they have.
    """
    from linexport.sources.carried_buffers import buffers_of, restart

    if not names:
        return (), None
    buffers, varies = buffers_of(given.module, names, given.args, given.kwargs, location)
    restart(given.module, buffers)
    reason = f"the batch stays that of the example: forward writes the buffer {names[0]}"
    return buffers, None if varies else reason


def _frozen_draws(module: LibraryObject) -> tuple[str, ...]:
    """Warn of random features that a library draws anew while it trains."""
    drawn = [
        type(part).__name__
        for part in module.modules()
        if any("redraw" in name for name in dir(part))
    ]
    if not drawn:
        return ()
    return (
        f"{drawn[0]} can draw its random features anew, as in training: those it has now are "
        "frozen into the artifact.",
    )


@dataclass(frozen=True)
class _Given:
    """A factory's result, checked.

    Attributes:
        module: in any mode.
        args: positional example inputs.
        kwargs: those by name, in the order of forward's parameters.
        chosen: dynamic_shapes were given.
        shapes: those, None where nothing varies.
    """

    module: LibraryObject
    args: Positional
    kwargs: Keywords
    chosen: bool = False
    shapes: DynamicShapes = None

    @property
    def examples(self) -> Positional:
        """All example inputs, those by name behind the others."""
        return (*self.args, *self.kwargs.values())

    def split(self, examples: tuple[object, ...]) -> tuple[Positional, Keywords]:
        """Return args and kwargs of as many values as there are examples."""
        count = len(self.args)
        return examples[:count], dict(zip(self.kwargs, examples[count:], strict=True))


def _unpack(source: str, result: object) -> _Given:
    """Check what the factory returned."""
    import torch

    if not isinstance(result, tuple) or len(result) not in (2, 3, 4):
        length = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise UsageError(f"{source} returned a {type(result).__name__}{length}. {_RETURNS}.")
    module, args, *rest = result
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"{source} returned a {type(module).__name__} as module. {_RETURNS}, where module is "
            "a torch.nn.Module; wrap a function in one."
        )
    if not isinstance(args, tuple):
        raise UsageError(
            f"{source} returned a {type(args).__name__} as args. {_RETURNS}, where args is a "
            "tuple; write (x,) for a single tensor."
        )
    shapes: list[Any]
    if len(rest) == 1 and isinstance(rest[0], dict) and _is_inputs(module, args, rest[0]):
        kwargs, shapes = rest[0], []
    else:
        kwargs, shapes = (rest[0] or {}, rest[1:]) if len(rest) == 2 else ({}, rest)
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise UsageError(
            f"{source} returned a {type(kwargs).__name__} as kwargs. {_RETURNS}, where kwargs is a "
            "dict of example inputs by the names of forward's parameters."
        )
    if not _has_tensor((args, kwargs)) and not is_language_model(module):
        raise UsageError(f"{source} returned args without a tensor. {_RETURNS}.")
    args, kwargs = _in_order(module, args, kwargs)
    given = _Given(module, args, kwargs, bool(shapes), *shapes)
    if given.chosen:
        _check_shapes(source, given)
    return given


def _is_inputs(module: LibraryObject, args: Positional, given: Mapping[object, object]) -> bool:
    """Return whether a dict has inputs by name: a tensor, or parameters that args do not fill."""
    parameters = [*inspect.signature(module.forward).parameters]
    return _has_tensor(given) or (bool(given) and {*given} <= {*parameters[len(args) :]})


def _has_tensor(value: object) -> bool:
    import torch

    from linexport.system.torch_internals.trees import pytree

    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _in_order(
    module: LibraryObject, args: Positional, kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return arguments by position where they can be, others in the order of the parameters."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:  # running it says what is wrong
        return args, kwargs
    return bound.args, bound.kwargs


def _check_shapes(source: str, given: _Given) -> None:
    from linexport.system.torch_internals.trees import pytree

    shapes, count = given.shapes, len(given.examples)
    if shapes is not None and not isinstance(shapes, tuple | list | dict):
        raise UsageError(
            f"{source} returned a {type(shapes).__name__} as dynamic_shapes. Expected one entry "
            "per argument, as torch.export.export takes, for example ({0: Dim.DYNAMIC},)."
        )
    entries = shapes.values() if isinstance(shapes, dict) else shapes or ()
    if any(map(_says_no_size, entries)):
        raise UsageError(
            f"{source} returned dynamic_shapes with values that say nothing of sizes. Example "
            "inputs by name without a tensor go into (module, args, kwargs, dynamic_shapes)."
        )
    names = [x for x in pytree.tree_leaves(shapes) if isinstance(x, str)]
    if unusable := [name for name in names if not name.isidentifier()]:
        raise UsageError(
            f"{source} returned dynamic_shapes with the name {unusable[0]!r}. Expected a name of "
            "letters, digits and underscores for each size that varies."
        )
    if isinstance(shapes, tuple | list) and len(shapes) != count:
        raise UsageError(
            f"{source} returned {len(shapes)} entries of dynamic_shapes for {count} arguments. "
            "Give one per argument, None where nothing varies."
        )


def _says_no_size(entry: object, named: bool = False) -> bool:
    """Return whether an entry has a value that is not a size.

    A string is the name of one in the dims of a tensor, by place or in a list.
    """
    if isinstance(entry, dict):
        dims = bool(entry) and all(isinstance(key, int) for key in entry)
        return any(_says_no_size(x, dims) for x in entry.values())
    if isinstance(entry, list | tuple):
        return any(_says_no_size(x, True) for x in entry)
    return isinstance(entry, bool | float) or (isinstance(entry, str) and not named)


def _dims(given: _Given, runs: Runs, one_batch: str | None) -> DefaultDims:
    """Return the examples with the dims of the factory, else with those that are usual."""
    if not given.chosen:
        return default_dims(given.examples, runs, one_batch)
    shapes = tied(given.examples, _as_dims(_whole(_by_position(given), given.examples)), runs)
    spec = tuple(shapes.values()) if isinstance(shapes, dict) else shapes
    return DefaultDims(repeat_ones_where(given.examples, spec), shapes, ())


def _by_position(given: _Given) -> Any:
    """Return an entry for each argument, where they are named after the parameters of forward."""
    shapes = given.shapes
    if not isinstance(shapes, dict):
        return shapes
    parameters = inspect.signature(given.module.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [p.name for p in parameters if p.kind in plain][: len(given.args)]
    names = [*first, *given.kwargs]
    if len(names) != len(given.examples):
        return shapes  # torch says what is wrong with it
    numbers = {
        name
        for name, value in zip(names, given.examples, strict=True)
        if name not in shapes and not _has_tensor(value)
    }
    if {*shapes} | numbers != {*names}:
        return shapes
    return tuple(shapes.get(name) for name in names)


def _whole(shapes: Any, examples: Positional) -> Any:
    """Return an entry for each number of a pair, say, of which none varies, as torch has it."""
    from linexport.system.torch_internals.trees import pytree

    if not isinstance(shapes, tuple | list) or len(shapes) != len(examples):
        return shapes
    return tuple(
        pytree.tree_map(lambda _: None, value)
        if entry is None and isinstance(value, tuple | list | dict)
        else entry
        for entry, value in zip(shapes, examples, strict=True)
    )


def _as_dims(shapes: object) -> Any:
    """Return ``Dim.DYNAMIC`` for every ``Dim.AUTO``, and dims for names.

    torch fixes ``AUTO`` where code counts to it. Names are what ``torch.onnx.export`` takes.
    """
    from torch.export import Dim

    from linexport.system.torch_internals.trees import pytree

    named: dict[str, Any] = {}

    def dim(given: object) -> object:
        if isinstance(given, str):
            return named.setdefault(given, Dim(given))
        return Dim.DYNAMIC if given is Dim.AUTO else given

    return pytree.tree_map(dim, shapes)
