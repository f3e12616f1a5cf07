"""The parameters of a library's functions by what they mean, whatever a release calls them.

A replacement says what it needs by the names that the newest release has. A parameter of a function
is one of them by

    its name        the same, or one of ``NAMES`` that earlier releases had for it,
    its annotation  the library's ``Cache`` is the cache,
    its place       between two that are known, where as many are missing as are unknown,
    a word of it    the only unknown one that has "mask" in its name is the mask.

Nothing of this is a proof: parity compares every model with its library's own code. What is unknown
and has a default is left out; what is unknown and must be given is refused by its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from linexport.errors import UnsupportedModelError
from linexport.system.untyped import TorchCallable
from linexport.system.versions import TRANSFORMERS, ReleaseWindow

NAMES = {
    "cache_params": "cache",  # transformers 5.23 and before
    "past_key_values": "cache",  # transformers 5.23 and before
}
"""Names that a parameter had in some releases, and the name that linexport has for it."""

ANNOTATIONS = {"cache": re.compile(r"\bCache\b")}
"""Words in the annotation of a parameter that has no known name."""

WORDS = {"attention_mask": "mask", "position_ids": "position"}
"""Words in the name of a parameter that is not a known one."""

NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def signature(function: Callable[..., object]) -> Signature:
    """Return the signature of a function, of that behind its wrappers."""
    return inspect.signature(inspect.unwrap(function))


def match(function: Signature, expected: Signature) -> dict[str, str]:
    """Return the names of a function's parameters, by linexport's names for them.

    Args:
        function: of a library.
        expected: with linexport's names, in the order that the library has.
    """
    own, needed = _named(function), _named(expected)
    if "self" not in needed:
        own.pop("self", None)
    found = _by_name(own, needed)
    for name, words in ANNOTATIONS.items():
        if name in needed and name not in found:
            free = (n for n in own if n not in found.values())
            place = next((n for n in free if words.search(str(own[n].annotation))), None)
            found |= {name: place} if place else {}
    found |= _by_place(own, needed, found)
    for name, word in WORDS.items():
        unknown = [n for n in own if word in n and n not in found.values()]
        if name in needed and name not in found and len(unknown) == 1:
            found[name] = unknown[0]
    return found


def is_same(function: Signature, expected: Signature) -> bool:
    """Return whether a function has the expected parameters by name, and no others."""
    own, needed = _named(function), _named(expected)
    found = _by_name(own, needed)
    return len(found) == len(own) and {n for n in needed if _must(needed[n])} <= found.keys()


def binds(function: Callable[..., object], replacement: Callable[..., object]) -> bool:
    """Return whether a replacement is given all it needs, and knows all that must be given."""
    own, needed = signature(function), signature(replacement)
    names, known = match(own, needed), _named(own)
    return {n for n in known if _must(known[n])} <= {*names.values(), "self"} and {
        n for n, p in _named(needed).items() if _must(p)
    } <= names.keys()


def _by_name(own: Mapping[str, Parameter], needed: Mapping[str, Parameter]) -> dict[str, str]:
    found = {name: name for name in own if name in needed}
    for name in own:
        if NAMES.get(name) in needed:
            found.setdefault(NAMES[name], name)
    return found


def _by_place(
    own: Mapping[str, Parameter], needed: Mapping[str, Parameter], found: Mapping[str, str]
) -> dict[str, str]:
    """Return names of what must be given by the known ones before and after them."""
    order, placed = list(own), dict[str, str]()
    for before, missing, after in _gaps(list(needed), found):
        first = order.index(found[before]) + 1 if before else 0
        last = order.index(found[after]) if after else len(order)
        unknown = [n for n in order[first:last] if n not in found.values()]
        if not (before and after and len(missing) == len(unknown)):
            # A parameter with a default may as well be a new one.
            unknown = [n for n in unknown if _must(own[n])]
            missing = [n for n in missing if _must(needed[n])]
        if len(missing) == len(unknown):
            placed |= dict(zip(missing, unknown, strict=True))
    return placed


def _gaps(
    needed: Sequence[str], found: Mapping[str, str]
) -> Iterator[tuple[str | None, list[str], str | None]]:
    """Yield names that are missing one after another, with the known ones around them."""
    before, missing = None, list[str]()
    for name in (*needed, None):
        if name is not None and name not in found:
            missing.append(name)
            continue
        if missing:
            yield before, missing, name
        before, missing = name, []


def is_cache(of: Signature, name: str | None) -> bool:
    """Return whether a parameter is annotated as the library's cache."""
    parameter = of.parameters.get(name or "")
    return parameter is not None and bool(ANNOTATIONS["cache"].search(str(parameter.annotation)))


def _named(of: Signature) -> dict[str, Parameter]:
    return {name: p for name, p in of.parameters.items() if p.kind in NAMED}


def _must(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty


def takes_any(of: Signature) -> bool:
    """Return whether a function takes arguments of any name."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in of.parameters.values())


@dataclass(frozen=True)
class Bound:
    """A replacement that is called as the function of a library is.

    Attributes:
        place: of the function, for messages.
        function: its signature.
        replacement: what is called.
        names: what the function calls the replacement's parameters.
        advice: how to get a release that is known.
        notes: what calls gave to parameters that are unknown and have a default, filled as they
            run.
    """

    place: str
    function: Signature
    replacement: TorchCallable
    names: Mapping[str, str]
    advice: str
    notes: set[str]

    def as_function(self) -> Callable[..., object]:
        """Return it as a function, which a class makes a method of."""

        def call(*args: object, **kwargs: object) -> Any:
            return self(*args, **kwargs)

        return call

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the replacement with what the function is called with.

        Raises:
            UnsupportedModelError: it lacks a parameter, or the function has one that is unknown.
        """
        self._check()
        own = {name: self.names.get(NAMES.get(name, name), name) for name in kwargs}
        given = self.function.bind(*args, **{own[name]: value for name, value in kwargs.items()})
        given.apply_defaults()
        found = dict(given.arguments)
        taken = {name: found.pop(place) for name, place in self.names.items()}
        expected = signature(self.replacement)
        for name, value in found.items():
            parameter = self.function.parameters[name]
            if parameter.kind is Parameter.VAR_KEYWORD:
                known = value if takes_any(expected) else value.keys() & expected.parameters.keys()
                taken |= {n: value[n] for n in known if n not in taken}
            elif name != "self" and not _is_default(value, parameter.default):
                self.notes.add(f"{name} of {self.place}")
        return self.replacement(**taken)

    def _check(self) -> None:
        own, expected = _named(self.function), _named(signature(self.replacement))
        unknown = [n for n in own if _must(own[n]) and n not in (*self.names.values(), "self")]
        if unknown:
            raise self._error(unknown, "which linexport does not know", own, expected)
        missing = [n for n in expected if _must(expected[n]) and n not in self.names]
        if missing:
            raise self._error(missing, "which linexport needs", own, expected, "does not have")

    def _error(
        self,
        names: Iterable[str],
        what: str,
        own: Iterable[str],
        expected: Iterable[str],
        verb: str = "has",
    ) -> UnsupportedModelError:
        found = ", ".join(map(repr, names))
        return UnsupportedModelError(
            f"{self.place} {verb} the parameter {found}, {what}: its parameters are "
            f"({', '.join(own)}); linexport knows it with ({', '.join(expected)}). {self.advice}"
        )


def bind(
    place: str,
    function: Callable[..., object],
    replacement: Callable[..., object],
    window: ReleaseWindow = TRANSFORMERS,
    notes: set[str] | None = None,
) -> TorchCallable:
    """Return a function that is called as one of a library is, and calls a replacement.

    Args:
        place: of the function, for messages.
        function: of the library.
        replacement: its parameters say what it needs.
        window: releases that it was tried with.
        notes: see ``Bound``.
    """
    own = signature(function)
    names = match(own, signature(replacement))
    notes = set() if notes is None else notes
    return Bound(place, own, replacement, names, window.advice(), notes).as_function()


def _is_default(value: object, default: object) -> bool:
    """Return whether a value is that of a parameter that was not given."""
    plain = isinstance(value, bool | int | float | str | tuple | None)
    return value is default or (plain and type(value) is type(default) and value == default)
