"""A module of token ids compared with a graph of its own, without a conversion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from linexport import parity
from linexport.graph.dims import DimRange
from linexport.parity.cases import DEFAULT_SIZES
from linexport.parity.reference.extra_outputs import OpenChanged
from linexport.parity.tolerances import TOLERANCES
from linexport.sources.loaded_model import LanguageFacts


def check_language(module: nn.Module, opened: OpenChanged, vocabulary: int) -> parity.Parity:
    """The parity of a graph of ids (batch, seq) to logits; ``opened`` opens it, changed or not."""
    tested: Any = SimpleNamespace(
        packed=False,
        loaded=SimpleNamespace(
            module=module, language=LanguageFacts(vocabulary, 100, ()), vision=None, given=None
        ),
        open=opened,
        open_changed=opened,
        dims={"batch": DimRange(batch=True), "seq": DimRange()},
        states=(),
        output_names=["logits"],
        tolerance=TOLERANCES["float32"],
        initial_state=lambda batch: {},
        complete=dict,
        chosen=DEFAULT_SIZES,
        behind_at_once=0,
    )
    return parity.check_language(tested)
