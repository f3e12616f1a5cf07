"""An artifact as a folder that onnxruntime-genai runs.

Its decoder carries states by name, in layers of two kinds, and one mask over all tokens so far:

    past_key_values.<i>.key, .value                    attention, (B, H, T, d), growing
    past_key_values.<i>.conv_state, .recurrent_state   (B, C, k - 1) and (B, H, d_k, d_v), each of
                                                       one shape in all layers
    attention_mask                                     (B, past + T)

Where a model's states come in such pairs they are renamed. Other states (several convolutions a
layer, normalisers, none) are packed into one pair: recurrent_state is all of them end to end, at
the price of copying them at every step.

Prompts of several lengths are padded on the right there: in a batch, padding tokens behind the last
other token of a row are 0 in the mask, those in front of the first are taken for tokens. So states
are those of each row's last token, see ``Rewiring.end_at_last_tokens``.

Source: src/models/{recurrent_state,kv_cache,position_inputs,logits}.cpp of onnxruntime-genai 0.18.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from linexport import manifest as manifests
from linexport.artifact import write
from linexport.artifact.checked import checked_artifact
from linexport.artifact.io_adapter import MASK, Rewiring, pairs, recurrent, rows
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.text.tokenizer import context, end_tokens, model_config
from linexport.errors import ParityError, UsageError
from linexport.graph.states import PADDING, State
from linexport.system.json_object import JsonObject
from linexport.targets.lowering.cuda_norms import known_to_onnx

CONFIG = "genai_config.json"
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
CONTEXT = 131072
"""Written where nothing limits the model: the library wants a number."""

PADDED = (
    "Prompts of a batch may have several lengths: pad them on the right with token {}, as "
    "Tokenizer.encode_batch does. onnxruntime-genai takes padding on the left for tokens of the "
    "prompt."
)
EVEN = "Prompts of a batch need one length: {}, so that padding would be read as tokens."


@dataclass(frozen=True)
class GenaiFolder:
    """A folder that onnxruntime-genai runs.

    Attributes:
        path: of it.
        padded: prompts of several lengths may be padded on the right.
        note: what users need to know of batches.
    """

    path: Path
    padded: bool
    note: str


def write_genai(artifact: str | Path, output: str | Path) -> GenaiFolder:
    """Write a folder for ``onnxruntime_genai.Model``: the model, its configuration, its tokenizer.

    Args:
        artifact: folder of a language model that streams.
        output: a new or empty folder.

    Raises:
        UsageError: no such artifact, no language model, no states, key-value rows of several
            shapes, or an output with things in it.
        ParityError: the artifact failed a check.
    """
    source, place = Path(artifact), Path(output)
    manifest = checked_artifact(source).manifest
    if manifest.status != "ok":
        raise ParityError(f"{source} {manifest.failure}; see {source / manifests.REPORT}.")
    if not manifest.states:
        raise UsageError(f"{source} does not stream: {manifest.why_stateless}")
    if manifest.vision is not None:
        raise UsageError(
            f"{source} has a vision tower; onnxruntime-genai takes text alone of it. Convert the "
            "model again with --no-vision."
        )
    if manifest.mtp is not None:
        raise UsageError(
            f"{source} has a head for multi-token prediction, which onnxruntime-genai does not "
            "run. Convert the model again with --no-mtp."
        )
    if manifests.is_artifact(place):
        raise UsageError(f"{place} is an artifact; expected a new or empty folder.")
    write.check_output(place, overwrite=False)
    states = [State.from_record(s) for s in manifest.states]
    _check_mask(manifest, states)
    _check_rows(source, states)
    model = onnx.load_model(str(source / manifests.MODEL))
    why_even = _rewire(model, states, language_interface(manifest).tokens)
    config = _config(manifest, states, source)
    onnx.checker.check_model(known_to_onnx(model))
    with write.staged(place) as folder:
        write.save_model(model, folder)
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        kept = [name for name in manifests.LANGUAGE_FILES if name in manifest.files]
        write.copy_files((source / name for name in kept), folder)
        write.publish(folder, place)
    padding = PADDED.format(config["model"]["pad_token_id"])
    note = padding if why_even is None else EVEN.format(why_even)
    return GenaiFolder(place, why_even is None, note)


def _check_mask(manifest: manifests.Manifest, states: Sequence[State]) -> None:
    """The library tells a model by its mask which rows there are."""
    if any(s.op == PADDING for s in states) and MASK not in [i.name for i in manifest.inputs]:
        raise UsageError(
            f"{manifest.artifact} keeps rows of softmax attention and takes no {MASK}, which "
            "onnxruntime-genai feeds. Use linexport.load(...).generate."
        )


def _check_rows(source: Path, states: Sequence[State]) -> None:
    """The library's cache has one number of heads and one width, of keys as of values."""
    shapes = {(s.shape[1], s.shape[3]): s.past for s in states if rows(s)}
    if len(shapes) > 1:
        found = ", ".join(f"{past} {h} of {d}" for (h, d), past in shapes.items())
        raise UsageError(
            f"{source} keeps key-value rows of several shapes (heads of a width: {found}), as "
            "latent attention does; onnxruntime-genai has one for all. Use "
            "linexport.load(...).generate."
        )


def _rewire(model: onnx.ModelProto, states: Sequence[State], tokens: str) -> str | None:
    """Change the inputs and outputs of a model in place.

    Returns:
        The reason why prompts of a batch need one length; None where they may be padded.
    """
    work, why_even = Rewiring(model), None
    if MASK not in [i.name for i in model.graph.input]:
        why_even = f"the model has no {MASK}"
    elif left := work.end_at_last_tokens(states):
        why_even = f"the state {left[0].past} has no place for each row's last token"
    for state in states:
        found = rows(state)
        if found is not None:
            kind, layer = found
            work.rename(state, *_names(layer, kind))
    two = pairs(states)
    if two is not None:
        for number, pair in enumerate(two):
            for state, part in zip(pair, ("conv_state", "recurrent_state"), strict=True):
                work.rename(state, *_names(number, part))
    elif recurrent(states):
        work.pack(recurrent(states), *_names(0, "recurrent_state"), ones=2)
        work.pass_through(*_names(0, "conv_state"), [1, 1])
    work.mask(tokens, states)
    work.finish()
    return why_even


def _names(number: int, part: str) -> tuple[str, str]:
    return PAST.format(number, part), PRESENT.format(number, part)


def _config(manifest: manifests.Manifest, states: Sequence[State], source: Path) -> JsonObject:
    """genai_config.json."""
    language = language_interface(manifest)
    keys = {layer: s for s in states for kind, layer in [rows(s) or ("", 0)] if kind == "key"}
    first = next(iter(keys.values()), None)
    heads, width = (first.shape[1], first.shape[3]) if first else (1, 1)
    stated = model_config(source, manifest.files)
    numbers = {name: value for name, value in stated.items() if type(value) is int}
    length = context(source, manifest.files) or CONTEXT
    ends = sorted(end_tokens(source, manifest.files))
    layers = keys.keys() | set(range(len(pairs(states) or [1])))
    decoder = {
        "session_options": {"log_id": "linexport", "provider_options": []},
        "filename": manifests.MODEL,
        "hidden_size": numbers.get("hidden_size", 1),
        "num_attention_heads": numbers.get("num_attention_heads", heads),
        "num_key_value_heads": heads,
        "head_size": width,
        "num_hidden_layers": len(layers),
        "inputs": {
            "input_ids": language.tokens,
            "attention_mask": MASK,
            "past_key_names": PAST.format("%d", "key"),
            "past_value_names": PAST.format("%d", "value"),
        },
        "outputs": {
            "logits": language.logits,
            "present_key_names": PRESENT.format("%d", "key"),
            "present_value_names": PRESENT.format("%d", "value"),
        },
    }
    return {
        "model": {
            "type": "decoder",
            "vocab_size": language.vocabulary,
            "context_length": length,
            "bos_token_id": numbers.get("bos_token_id", 0),
            "eos_token_id": ends,
            "pad_token_id": numbers.get("pad_token_id", 0),
            "decoder": decoder,
        },
        "search": {"do_sample": False, "max_length": length, "past_present_share_buffer": False},
    }
