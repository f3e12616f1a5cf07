"""Calls of softmax attention in a module, with the facts known of each."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization.calibration import Rows
from linexport.manifest.linearization_records import AttentionSite
from linexport.models import attention_masks, multihead_attention
from linexport.models.softmax_calls import Attending, Call, Projecting


@dataclass(frozen=True, kw_only=True)
class Site(AttentionSite):
    """A call, by its place ``index`` in the order of calls."""

    index: int

    @property
    def replaceable(self) -> bool:
        """Nothing stands against it."""
        return self.reason is None


def find_sites(module: nn.Module, batches: Iterable[Rows], required: bool = True) -> list[Site]:
    """Every call of softmax attention, in order; the module runs on all batches.

    Args:
        module: in inference mode.
        batches: its arguments.
        required: refuse a module without such calls.

    Raises:
        UsageError: the module does not run on these inputs.
        UnsupportedModelError: the module has no such call, or their number changes from run to run.
    """
    runs = [_Run(module, batch) for batch in batches]
    if len({len(run.sites) for run in runs}) != 1:
        counts = ", ".join(str(len(run.sites)) for run in runs)
        raise UnsupportedModelError(
            f"The module calls softmax attention {counts} times in runs on different batches: "
            "the calls cannot be matched."
        )
    if required and not runs[0].sites:
        raise UnsupportedModelError(_nothing(module))
    return [_joined(runs, at) for at in range(len(runs[0].sites))]


def _nothing(module: nn.Module) -> str:
    left = [f"{n}: {multihead_attention.refusal(m)}" for n, m in module.named_modules()
            if isinstance(m, nn.MultiheadAttention) and multihead_attention.refusal(m)]  # fmt: skip
    found = f" {'; '.join(left)}." if left else ""
    return (
        f"{type(module).__name__} calls no softmax attention: there is nothing to replace.{found} "
        "What is found: torch.nn.MultiheadAttention, F.scaled_dot_product_attention in any module "
        "(models of transformers: attn_implementation='sdpa'), and softmax attention of "
        "linexport.models. Scores, softmax and weighted sum written out one by one are not."
    )


def _joined(runs: list[_Run], at: int) -> Site:
    """Merge the sites of all runs: a reason of any of them, and a memory in all."""
    sites = [run.sites[at] for run in runs]
    reasons = [site.reason for site in sites if site.reason]
    first, constants = sites[0], [run.constants[at] for run in runs]
    same = all(c is not None and _equal(c, constants[0]) for c in constants)
    causal = {site.causal for site in sites}
    if len(causal) != 1:
        reasons.append("it is causal in some runs and not in others")
    return replace(
        first,
        memory=same and not first.causal,
        cross=any(site.cross for site in sites),
        masked=any(site.masked for site in sites),
        reason=reasons[0] if reasons else None,
    )


def _equal(one: Any, other: Any) -> bool:
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(one, other, strict=True))


class _Run:
    """The sites in one run, and keys and values of those whose rows all have the same."""

    def __init__(self, module: nn.Module, batch: Rows) -> None:
        self.sites: list[Site] = []
        self.constants: list[tuple[Tensor, Tensor] | None] = []
        self.path = [""]
        with _paths(module, self.path), torch.no_grad():
            self.matrices = {n: p for n, p in module.named_parameters() if p.dim() == 2}
            with Projecting(self.matrices.items(), self._project), Attending(self._record):
                run(module, batch)

    def _record(self, index: int, call: Call) -> Tensor:
        *_, heads, length, d = call.query.shape
        keys, d_v = call.value.shape[-2:]
        name = self.path[-1] or "attention"
        kind, reason = _kind(call, length, keys)
        self.sites.append(
            Site(
                index=index,
                name=numbered(name, [site.name for site in self.sites]),
                heads=heads,
                kv_heads=call.key.shape[-3] if call.key.dim() > 2 else 1,
                head_dim=d,
                value_dim=d_v,
                scale=call.factor,
                causal=kind == "causal",
                masked=call.attn_mask is not None,
                cross=length != keys,
                length=length,
                keys=keys,
                reason=reason,
            )
        )
        self.constants.append(_constant(call) if reason is None else None)
        return call.softmax()

    def _project(self, name: str, result: Tensor) -> None:
        """The first product after a call that takes what came out of it."""
        if not self.sites or self.sites[-1].projection is not None:
            return
        site = self.sites[-1]
        if site.heads * site.value_dim in self.matrices[name].shape:
            self.sites[-1] = replace(site, projection=name)


def _kind(call: Call, length: int, keys: int) -> tuple[str, str | None]:
    """Return the kind of mask, "keys" or "causal", and the reason against replacing the call."""
    if call.query.dim() != 4:
        return "keys", f"its queries have {call.query.dim()} dimensions instead of 4"
    if keys < 2:
        return "keys", "its rows have one key, which is all that a query can attend to"
    if call.dropout_p:
        return "keys", f"it drops {call.dropout_p:.0%} of its weights, in inference mode too"
    if call.is_causal:
        if call.attn_mask is not None or length != keys:
            return "causal", "it is causal over queries and keys of different lengths"
        return "causal", None
    if call.attn_mask is None:
        return "keys", None
    found = attention_masks.understood(call.attn_mask, length, keys)
    return (found, None) if found in ("keys", "causal") else ("keys", found)


def _constant(call: Call) -> tuple[Tensor, Tensor] | None:
    """Keys and values of the first row, where those of all rows are the same and all are seen."""
    masked = call.attn_mask is not None and not bool(attention_masks.visible(call.attn_mask).all())  # type: ignore[union-attr]
    if masked or len(call.key) < 2:
        return None
    same = all(bool((x == x[:1]).all()) for x in (call.key, call.value))
    return (call.key[0].clone(), call.value[0].clone()) if same else None


def numbered(name: str, before: Iterable[str]) -> str:
    """The name, with ``#2`` and so on where it is among those before."""
    earlier = sum(other.partition("#")[0] == name for other in before)
    return f"{name}#{earlier + 1}" if earlier else name


def run(module: nn.Module, batch: Rows) -> Any:
    """The module on one batch.

    Raises:
        UsageError: it does not run on it.
    """
    try:
        return module(*batch)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        shapes = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in batch)
        names = ", ".join(inspect.signature(module.forward).parameters)
        raise UsageError(
            f"The module does not run on the calibration data ({shapes}): {type(error).__name__}: "
            f"{first}. Give the arguments of its forward in order ({names}), one row a sample."
        ) from error


@contextmanager
def _paths(module: nn.Module, path: list[str]) -> Iterator[None]:
    """Keeps ``path[-1]`` the name of the module that is running."""
    handles = []

    def entering(name: str) -> object:
        return lambda *_: path.append(name)

    def leaving(*_: object) -> None:
        path.pop()

    for name, child in module.named_modules():
        if name:
            handles.append(child.register_forward_pre_hook(entering(name)))
            handles.append(child.register_forward_hook(leaving, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
