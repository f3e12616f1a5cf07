"""The graph that an engine is built of, and its profiles.

That of a language model takes the places of the tokens whose logits are read: of a real vocabulary,
those of all tokens of the largest call would be tens of gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from linexport.plugins.ops.registry import dim_of
from linexport.targets.base import Converted
from linexport.targets.lowering.kept_logits import with_logits_at
from linexport.targets.trt import parser_form, profiles

LOGITS_BYTES = 2**28
"""Bytes of the logits of a call at most: how many tokens of a row are kept is chosen by them."""


@dataclass(frozen=True)
class EngineForm:
    """A graph to parse, and the sizes of its calls.

    Attributes:
        model: as the parser takes it.
        profiles: at least one.
        logits: the output that has the tokens at the input ``logits_at`` alone; None where outputs
            have all tokens.
    """

    model: onnx.ModelProto
    profiles: list[profiles.Profile]
    logits: str | None


def engine_form(model: onnx.ModelProto, converted: Converted) -> EngineForm:
    """Return what an engine is built of.

    Args:
        model: as the parser takes it.
        converted: describes it.
    """
    grown = sorted(parser_form.symbols(model) - set(converted.dims))
    kept = 0 if converted.logits is None else most_kept(model, converted.logits, converted)
    form = with_logits_at(model, converted.logits) if converted.logits and kept else model
    given = form is not model
    chosen = profiles.profiles(
        converted.dims, bool(converted.states), grown, converted.past, kept if given else 0
    )
    return EngineForm(form, chosen, converted.logits if given else None)


def most_kept(model: onnx.ModelProto, logits: str, converted: Converted) -> int:
    """Return of how many tokens a row logits have room in ``LOGITS_BYTES``, for the largest batch.

    At least one; 0 where the sizes of the logits are not known.
    """
    output = next(o for o in model.graph.output if o.name == logits).type.tensor_type
    batch, _, words = map(dim_of, output.shape.dim)
    if batch in converted.dims:
        batch = converted.dims[str(batch)].max
    if not isinstance(batch, int) or not isinstance(words, int):
        return 0
    dtype = onnx.helper.tensor_dtype_to_np_dtype(output.elem_type)
    return max(1, LOGITS_BYTES // (batch * words * np.dtype(dtype).itemsize))
