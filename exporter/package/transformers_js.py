"""``transformers.js``: a folder that @huggingface/transformers loads in node and in browsers.

    onnx/model<_suffix>.onnx      input_ids (B, T), attention_mask (B, past + T) -> logits (B, T, V)
    past_conv.<i>                 (B, C, k - 1), and past_recurrent.<i> (B, H, d_k, d_v), of layers
                                  with linear attention; their next values are present_conv.<i>, ...
    past_key_values.<i>.key       (B, H, T, d) of layers with softmax attention, and .value

A model whose states do not come in such pairs has all of them, end to end, in one past_recurrent.
One without softmax attention has keys of width 0, whose rows the library counts.
Source: getCacheNames and addPastKeyValues of @huggingface/transformers 4.3.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnx

from linexport import manifest as manifests
from linexport.artifact import write
from linexport.artifact.io_adapter import Rewiring, layer, pairs, recurrent, rows
from linexport.artifact.text.language_interface import LanguageInterface, language_interface
from linexport.artifact.text.tokenizer import MODEL_CONFIG, end_tokens, model_config
from linexport.errors import UsageError
from linexport.graph.states import State
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.lookups import expand_lookups
from linexport.package.proving import transformers_js as proving
from linexport.package.standalone import save_one_file, standalone
from linexport.system.json_object import JsonObject

LAYOUT = "qwen3_next"
"""Model type with these names of states there, for models of types that have others."""

SAME_LAYOUT = (LAYOUT, "qwen3_5_text", "qwen3_5_moe_text")

FLOAT32 = ("fp32", "")
PRECISIONS = {"fp16": ("fp16", "_fp16"), "int8": ("q8", "_quantized"), "int4": ("q4", "_q4")}
"""Name of a kind of weights there, and suffix of the file, by the kind here."""


def _write(job: Packaging) -> Packaged:
    language, states = language_interface(job.manifest), _states(job)
    model, renamed = standalone(job)
    if renamed:
        raise UsageError(
            f"{job.source} has the name {next(iter(renamed))!r}, which this destination cannot "
            "hold. Convert the model again with plain names of inputs and outputs."
        )
    expand_lookups(model)
    layers = _rewire(model, states, language)
    onnx.checker.check_model(model)
    quantised = job.manifest.quantisation
    dtype, suffix = PRECISIONS.get(quantised.weights, FLOAT32) if quantised else FLOAT32
    folder = job.folder / "onnx"
    folder.mkdir()
    save_one_file(model, folder).rename(folder / f"model{suffix}.onnx")
    files = job.manifest.files
    kept = [n for n in manifests.LANGUAGE_FILES if n in files and n != MODEL_CONFIG]
    write.copy_files((job.source / name for name in kept), job.folder)
    config = _config(job, language, layers, dtype)
    (job.folder / MODEL_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    notes = [] if "tokenizer.json" in kept else ["It has no tokenizer: generate from token ids."]
    return Packaged(notes=tuple(notes))


def _states(job: Packaging) -> list[State]:
    """The states of a model that can be carried there.

    Raises:
        UsageError: there are none, or one of them cannot be.
    """
    states = [State.from_record(s) for s in job.manifest.states]
    if not states:
        raise UsageError(f"{job.source} does not stream: {job.manifest.why_stateless}")
    for state in states:
        if np.any(state.start(1)):
            raise UsageError(
                f"{job.source} has the state {state.past}, which begins with "
                f"{state.initial_value}; states begin with zero there. Use --for onnx."
            )
        if isinstance(state.shape[0], int):
            raise UsageError(
                f"{job.source} has the state {state.past}, which is one of all sequences; states "
                "have a row for each there. Use --for onnx."
            )
    return states


def _rewire(
    model: onnx.ModelProto, states: Sequence[State], language: LanguageInterface
) -> list[str]:
    """Name inputs and outputs as they are there; returns the types of the layers."""
    work, fixed = Rewiring(model), recurrent(states)
    attention = sorted({place[1] for place in map(rows, states) if place})
    found = pairs(states)
    linear = _numbers([layer(conv) for conv, _ in found or ()] or [0] * bool(fixed), attention)
    for state in states:
        place = rows(state)
        if place is not None:
            part = f"{place[1]}.{place[0]}"
            work.rename(state, f"past_key_values.{part}", f"present.{part}")
    if found is not None:
        for number, pair in zip(linear, found, strict=True):
            for state, part in zip(pair, ("conv", "recurrent"), strict=True):
                work.rename(state, f"past_{part}.{number}", f"present_{part}.{number}")
    elif fixed:
        work.pack(fixed, f"past_recurrent.{linear[0]}", f"present_recurrent.{linear[0]}")
    if not attention:
        attention = [max(linear) + 1]
        names = (f"{side}.{attention[0]}.key" for side in ("past_key_values", "present"))
        work.count_tokens(language.tokens, *names)
    work.mask(language.tokens, states)
    work.finish()
    for name, target in ((language.tokens, "input_ids"), (language.logits, "logits")):
        if name != target:
            work.call(name, target)
    _name_batch(model)
    count = max([*linear, *attention]) + 1
    return ["full_attention" if i in attention else "linear_attention" for i in range(count)]


def _numbers(layers: Sequence[int], attention: Sequence[int]) -> list[int]:
    """Return numbers of linear layers: their own, where these are distinct from attention's."""
    distinct = len({*layers} - {*attention}) == len(layers)
    first = max(attention, default=-1) + 1
    return list(layers) if distinct else [first + i for i in range(len(layers))]


def _name_batch(model: onnx.ModelProto) -> None:
    """Call the first dimension as it is called there, where other names are sizes of 0."""
    for info in (*model.graph.input, *model.graph.output):
        dims = info.type.tensor_type.shape.dim
        old = dims[0].dim_param
        for dim in dims:
            if dim.dim_param == old:
                dim.dim_param = "batch_size"


def _config(
    job: Packaging, language: LanguageInterface, layers: Sequence[str], dtype: str
) -> JsonObject:
    found = model_config(job.source, job.manifest.files)
    ours = {
        "model_type": LAYOUT,
        "layer_types": list(layers),
        "vocab_size": language.vocabulary,
        "eos_token_id": sorted(end_tokens(job.source, job.manifest.files)) or None,
        "transformers.js_config": {"dtype": dtype},
    }
    if found.get("model_type") in SAME_LAYOUT and found.get("layer_types") == ours["layer_types"]:
        ours["model_type"] = found["model_type"]
    left = ("architectures", "text_config", "vision_config", "auto_map", "layers_block_type")
    return {**{k: v for k, v in found.items() if k not in left}, **ours}


DESTINATION = Destination(
    "transformers.js",
    "Transformers.js 4.3, for node and browsers: a causal language model.",
    _write,
    write_texts=proving.write_texts,
)
