"""The head of a model's folder: of the class it names, and of what follows its hidden states.

Pooling of the hidden states h_t of a row, m_t = 1 for tokens and 0 for padding:

    mean    sum_t m_t h_t / sum_t m_t
    last    h_t of the last t with m_t = 1
    cls     h_t of the first t with m_t = 1
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest.records import HeadName
from linexport.sources.hugging_face.folder import MODULES
from linexport.sources.hugging_face.heads import BASE, Head, named_head
from linexport.sources.hugging_face.named_class import named_class
from linexport.sources.hugging_face.sentence_modules import (
    SentenceModules,
    first,
    last,
    mean,
    read_modules,
)
from linexport.system.json_object import JsonObject

POOLINGS = {"mean": mean, "last": last, "cls": first}
"""Poolings by name."""


def head_of(
    path: Path, config: JsonObject, pooling: str | None, modules: Path | None = None
) -> Head:
    """Return the head of the model that a configuration names.

    Args:
        path: of the configuration.
        config: that configuration; without architectures it is a causal language model's.
        pooling: one of ``POOLINGS``, in the place of modules of sentence-transformers; or None.
        modules: folder of these; None for that of the configuration.

    Raises:
        UsageError: an unknown pooling, or one for a model with a head.
        UnsupportedModelError: another head, or modules that are not converted.
    """
    check_pooling(pooling)
    head = named_head(path, config)
    if pooling is None:
        found = read_modules(modules or path.parent) if head is BASE else None
        return head if found is None else _of_modules(found)
    if head is not BASE:
        named = named_class(config) or "no architecture, so a causal language model"
        raise UsageError(
            f"--pooling {pooling} is for a base model, whose output is hidden states; {path} names "
            f"{named}. Save the base model alone: "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
        )
    return replace(BASE, name="pooled", output="pooled", pool=POOLINGS[pooling])


def _of_modules(modules: SentenceModules) -> Head:
    """Return the head of a model that modules of sentence-transformers follow."""
    name: HeadName = "pooled" if modules.modes else "hidden_states"
    return replace(
        BASE, name=name, output=modules.output, pool=modules, takes_prompt=modules.takes_prompt
    )


def check_pooling(pooling: str | None) -> None:
    """Refuse a pooling that there is not.

    Raises:
        UsageError: it is not one of ``POOLINGS``.
    """
    if pooling is not None and pooling not in POOLINGS:
        known = ", ".join(POOLINGS)
        raise UsageError(f"--pooling is {pooling!r}; expected one of {known}.")


def modules_left_out(folder: Path, pooling: str | None) -> tuple[str, ...]:
    """Warn of what sentence-transformers computes behind a pooling that the user chose."""
    path = folder / MODULES
    if pooling is None or not path.is_file():
        return ()
    types = re.findall(r'"type"\s*:\s*"[\w.]*?(\w+)"', path.read_text(encoding="utf-8"))
    left = [t for t in types if t not in ("Transformer", "Pooling")]
    if not left:
        return ()
    return (
        f"With --pooling, what modules.json names behind it is left out: {', '.join(left)}. "
        "Leave out --pooling to convert all of it.",
    )
