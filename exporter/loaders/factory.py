"""``package.module:callable`` becomes a LoadedModel: the user's own function builds the model.

The function takes no arguments and returns ``(module, args)`` or ``(module, args,
dynamic_shapes)``, the last in torch.export's notation; without it `default_dims` chooses. Its
module is looked up on Python's path and in the current directory. This runs the user's code, as
asked; what it prints goes to stderr.
"""

from __future__ import annotations

import inspect
from typing import Any

from linexport.errors import UsageError
from linexport.loaders.callables import find_callable, user_code
from linexport.loaders.default_dims import default_dims, repeat_ones_where
from linexport.loaders.hugging_face import import_model, is_language_model, is_of_transformers
from linexport.loaders.loaded_model import LoadedModel, Source
from linexport.loaders.weights import named_tensors, non_finite_warnings, parameter_summary

_RETURNS = "It must return (module, args) or (module, args, dynamic_shapes)"


def load_factory(source: str, *, seed: int, whole: bool = False) -> LoadedModel:
    """Call the function that `source` names.

    Args:
        source: ``package.module:callable``.
        seed: of torch's generator while the function runs, so that its random weights and inputs
            are the same every time.
        whole: a model of transformers as one plain module; see ``load_model``.

    Returns:
        The module in eval mode with its examples. Examples of size 1 in dims chosen here are
        repeated to 2, and a warning says so. A language model of transformers is taken as one,
        whatever its examples.

    Raises:
        UsageError: `source` is misspelt, cannot be imported, fails, or returns something else.
    """
    factory = find_callable(source, "a function without arguments that returns (module, args)")
    import torch

    with torch.random.fork_rng(devices=[]), user_code(f"{source} failed"):
        torch.manual_seed(seed)
        result = factory()
    return load_module(result, source, whole=whole)


def load_module(result: Any, location: str, *, whole: bool = False) -> LoadedModel:
    """Return a module with its examples as a model.

    Args:
        result: ``(module, args)`` or ``(module, args, dynamic_shapes)``, as a factory returns it.
        location: what the model is called.
        whole: see ``load_factory``.

    Raises:
        UsageError: `result` is something else.
    """
    from linexport.loaders.bfloat16 import widened

    module, args, dynamic_shapes, warnings = _unpack(location, result)
    module.eval()
    warnings = (*warnings, *_frozen_draws(module))
    origin = Source(
        kind="factory",
        location=location,
        sha256=None,
        description=parameter_summary(type(module).__name__, module),
    )
    if whole and is_of_transformers(module):
        from linexport.loaders.hugging_face import whole as plain

        return plain.whole(module.float(), origin)
    if is_language_model(module):  # it says itself how it is called
        return import_model(module.float(), origin)
    args, changed = widened(module, args)
    return LoadedModel(
        module=module,
        args=args,
        kwargs={},
        dynamic_shapes=dynamic_shapes,
        source=origin,
        warnings=(*warnings, *changed, *non_finite_warnings(named_tensors(module))),
    )


def _frozen_draws(module: Any) -> tuple[str, ...]:
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


def _unpack(source: str, result: Any) -> tuple[Any, tuple[Any, ...], Any, tuple[str, ...]]:
    """Check what the factory returned: module, args, dynamic_shapes, warnings."""
    import torch

    if not isinstance(result, tuple) or len(result) not in (2, 3):
        length = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise UsageError(f"{source} returned a {type(result).__name__}{length}. {_RETURNS}.")
    module, args = result[:2]
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
    if not any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(args)):
        raise UsageError(f"{source} returned args without a tensor. {_RETURNS}.")
    if len(result) == 2:
        default = default_dims(args)
        return module, default.args, default.dynamic_shapes, default.warnings
    shapes = result[2]
    if shapes is not None and not isinstance(shapes, tuple | list | dict):
        raise UsageError(
            f"{source} returned a {type(shapes).__name__} as dynamic_shapes. Expected one entry "
            "per argument, as torch.export.export takes, for example ({0: Dim.DYNAMIC},)."
        )
    if isinstance(shapes, tuple | list) and len(shapes) != len(args):
        raise UsageError(
            f"{source} returned {len(shapes)} entries of dynamic_shapes for {len(args)} arguments. "
            "Give one per argument, None where nothing varies."
        )
    shapes = _always_dynamic(_by_position(module, len(args), shapes))
    spec = tuple(shapes.values()) if isinstance(shapes, dict) else shapes
    return module, repeat_ones_where(args, spec), shapes, ()


def _by_position(module: Any, count: int, shapes: Any) -> Any:
    """Return an entry for each argument, where they are named after the parameters of forward."""
    if not isinstance(shapes, dict):
        return shapes
    parameters = inspect.signature(module.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in plain][:count]
    if len(names) != count or set(shapes) != set(names):
        return shapes  # torch says what is wrong with it
    return tuple(shapes[name] for name in names)


def _always_dynamic(shapes: Any) -> Any:
    """Return ``Dim.DYNAMIC`` for every ``Dim.AUTO``, which torch fixes where code counts to it."""
    from torch.export import Dim
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda dim: Dim.DYNAMIC if dim is Dim.AUTO else dim, shapes)
