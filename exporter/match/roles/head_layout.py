"""Heads, batch and position of roles -> the packed layout (B, T, heads * width) of the op."""

from __future__ import annotations

from dataclasses import dataclass

from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.terms import Leaf
from linexport.match.roles.roles import Roles


@dataclass(frozen=True)
class HeadLayout:
    """The order of head labels in each packed input.

    Attributes:
        query, key, value, decay, output: labels, the slowest first.
    """

    query: Index
    key: Index
    value: Index
    output: Index


def head_layout(roles: Roles) -> HeadLayout:
    """Heads in consecutive groups: of those that share one, the shared label comes first."""
    order = seen_axes(roles)
    # Queries that turn are made for every state.
    query = roles.heads(roles.value if roles.turn else roles.query)
    # Keys of 1 are made for every query.
    key = roles.heads(roles.key) if roles.key else query
    value = roles.heads(roles.value) if roles.value else key
    # Heads that share keys and values, and fade each at its own rate, have a state each: values are
    # repeated for them.
    faded = roles.heads(roles.decay.of(Leaf)) if roles.decay else set()
    value = value | (faded & query)
    kv = key | value
    # The op lets queries share keys, or keys share queries, not each in one label: then queries
    # are repeated for the labels that only keys have.
    if query - kv and kv - query:
        query = query | kv
    common = [a for a in order if a in kv and a in query]
    common.sort(key=lambda a: a not in key)
    rest = [a for a in order if a in kv and a not in query]
    rest.sort(key=lambda a: a not in key)
    all_kv = (*common, *rest)
    own = tuple(a for a in order if a in query and a not in kv)
    # Heads without a key of their own must be the fastest, or the keys are repeated.
    keys = tuple(a for a in all_kv if a in key)
    return HeadLayout(
        (*common, *own),
        keys if all_kv[: len(keys)] == keys else all_kv,
        all_kv,
        (*all_kv, *own),
    )


def check_heads(roles: Roles) -> None:
    """Check that a dimension of any size, such as the batch, is in query, key and value.

    Raises:
        NotAttentionError: one of them lacks it.
    """
    sides = {"query": roles.query, "key": roles.key, "value": roles.value}
    heads = {name: roles.heads(leaves) for name, leaves in sides.items() if leaves}
    of_any_size = {a for own in heads.values() for a in own if a.size.known is None}
    for name, own in heads.items():
        missing = of_any_size - own
        if missing:
            tensors = ", ".join(f.tensor.name for f in sides[name])
            sizes = ", ".join(sorted(str(a.size) for a in missing))
            raise NotAttentionError(
                f"its {name} ({tensors}) is the same along {sizes}, where others are not"
                f"{_projection(roles, name, missing)}"
            )


def _projection(roles: Roles, name: str, missing: set[Axis]) -> str:
    """Return that a side is a projection of tokens, sum_s E[s,j] x[b,s,e]; "" where it is not."""
    projected, width = {
        "key": (roles.value, roles.channels),
        "value": (roles.key, roles.widths),
        "query": ((), ()),
    }[name]
    tokens = size_of(roles.key_position)
    if roles.causal or tokens.known is not None or not missing <= roles.heads(projected):
        return ""
    names = ", ".join(f.tensor.name for f in projected)
    return (
        f": it projects {names} along the tokens ({tokens}) to a fixed number of them "
        f"({size_of(width)}), as Linformer does with keys and values"
    )


def seen_axes(roles: Roles) -> list[Axis]:
    """Labels in the order in which the value, then the others, have them."""
    leaves = (*roles.value, *roles.query, *roles.key)
    return list(dict.fromkeys(a for f in leaves for index in f.dims for a in index))


def axis_size(index: Index) -> int:
    """Return a number of heads.

    Raises:
        NotAttentionError: it is not fixed.
    """
    known = size_of(index).known
    if known is None:
        raise NotAttentionError("the number of its heads is not fixed")
    return known
