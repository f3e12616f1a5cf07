"""An artifact as a folder that onnxruntime-genai runs.

Its decoder carries states by name, in layers of two kinds, and one mask over all tokens so far:

    past_key_values.<i>.key, .value                    attention, (B, H, T, d), growing
    past_key_values.<i>.conv_state, .recurrent_state   (B, C, k - 1) and (B, H, d_k, d_v), each of
                                                       one shape in all layers
    attention_mask                                     (B, past + T)

Where a model's states come in such pairs they are renamed. Other states (several convolutions a
layer, normalisers, none) are packed into one pair: recurrent_state is all of them end to end, at
the price of copying them at every step.

Source: src/models/{recurrent_state,kv_cache,position_inputs}.cpp of onnxruntime-genai 0.18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport import manifest as manifests
from linexport.artifact import opening, write
from linexport.artifact.language_interface import language_interface
from linexport.artifact.tokenizer import end_tokens, model_config
from linexport.errors import ParityError, UsageError
from linexport.graph.interface import check_interface
from linexport.graph.states import State
from linexport.loaders.onnx_file.walk import nodes_within

CONFIG = "genai_config.json"
MASK, MASK_STATE = "attention_mask", "past_mask"
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
ROWS = re.compile(r"past_(key|value)_(0|[1-9]\d*)", re.ASCII)
"""Names of the states that are rows of attention, with the layer."""

CONTEXT = 131072
"""Written where nothing limits the model: the library wants a number."""


def write_genai(artifact: str | Path, output: str | Path) -> Path:
    """Write a folder for ``onnxruntime_genai.Model``: the model, its configuration, its tokenizer.

    Args:
        artifact: folder of a language model that streams.
        output: a new or empty folder.

    Returns:
        ``output``.

    Raises:
        UsageError: no such artifact, no language model, no states, key-value rows of several
            shapes, or an output with things in it.
        ParityError: the artifact failed its parity check.
    """
    source, place = Path(artifact), Path(output)
    manifest = manifests.read(source)
    opening.check_files(source, manifest)
    graph = opening.checked_graph(source / manifests.MODEL)
    check_interface(manifest, graph, str(source / manifests.MANIFEST))
    if manifest.status != "ok":
        raise ParityError(f"{source} failed its parity check; see {source / manifests.REPORT}.")
    if not manifest.states:
        raise UsageError(f"{source} does not stream: {manifest.why_stateless}")
    if manifests.is_artifact(place):
        raise UsageError(f"{place} is an artifact; expected a new or empty folder.")
    write.check_output(place, overwrite=False)
    states = [State.from_record(s) for s in manifest.states]
    _check_rows(source, states)
    model = onnx.load_model(str(source / manifests.MODEL))
    _Rewiring(model, language_interface(manifest).tokens).run(states)
    onnx.checker.check_model(model)
    with write.staged(place) as folder:
        write.save_model(model, folder)
        (folder / CONFIG).write_text(json.dumps(_config(manifest, states, source), indent=2))
        ours = (manifests.MODEL, manifests.DATA)
        write.copy_files((source / name for name in manifest.files if name not in ours), folder)
        write.publish(folder, place)
    return place


def _check_rows(source: Path, states: Sequence[State]) -> None:
    """The library's cache has one number of heads and one width, of keys as of values."""
    shapes = {(s.shape[1], s.shape[3]): s.past for s in states if _rows(s)}
    if len(shapes) > 1:
        found = ", ".join(f"{past} {h} of {d}" for (h, d), past in shapes.items())
        raise UsageError(
            f"{source} keeps key-value rows of several shapes (heads of a width: {found}), as "
            "latent attention does; onnxruntime-genai has one for all. Use "
            "linexport.load(...).generate."
        )


def _rows(state: State) -> tuple[str, int] | None:
    """Return ``key`` or ``value`` and the layer of rows (B, H, T, d); None for other states."""
    name = ROWS.fullmatch(state.past)
    if name is None or len(state.shape) != 4 or state.growing_axis != 2:
        return None
    return name[1], int(name[2])


def _recurrent(states: Sequence[State]) -> list[State]:
    return [s for s in states if s.growing_axis is None]


def _pairs(states: Sequence[State]) -> list[tuple[State, State]] | None:
    """Convolution and recurrent state of each layer, if that is what the states are."""
    fixed = _recurrent(states)
    firsts, seconds = fixed[::2], fixed[1::2]
    alike = all(
        len({(s.shape[1:], s.dtype) for s in side}) == 1 and len(side[0].shape) == rank
        for side, rank in ((firsts, 3), (seconds, 4))
        if side
    )
    if not fixed or len(fixed) % 2 or not alike:
        return None
    return list(zip(firsts, seconds, strict=True))


class _Rewiring:
    """Changes the inputs and outputs of a model in place."""

    def __init__(self, model: onnx.ModelProto, tokens: str) -> None:
        self.graph, self.tokens = model.graph, tokens
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []

    def run(self, states: Sequence[State]) -> None:
        for state in states:
            rows = _rows(state)
            if rows is not None:
                kind, layer = rows
                self._rename(state, layer, kind)
        pairs = _pairs(states)
        if pairs is not None:
            for layer, (conv, recurrent) in enumerate(pairs):
                self._rename(conv, layer, "conv_state")
                self._rename(recurrent, layer, "recurrent_state")
        elif _recurrent(states):
            self._pack(_recurrent(states))
        if any(i.name == MASK for i in self.graph.input):
            self._mask([s for s in states if s.past == MASK_STATE])
        nodes = [*self.before, *self.graph.node, *self.after]
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def _rename(self, state: State, layer: int, part: str) -> None:
        self._replace(self.graph.input, state.past, PAST.format(layer, part))
        self._replace(self.graph.output, state.present, PRESENT.format(layer, part))

    def _replace(self, infos: Any, old: str, new: str) -> None:
        """Call a value by another name everywhere."""
        next(i for i in infos if i.name == old).name = new
        for node in nodes_within(self.graph.node):
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]

    def _pack(self, states: Sequence[State]) -> None:
        """All states as one recurrent_state (B, 1, 1, N), and a conv_state of nothing."""
        if {s.dtype for s in states} != {"float32"}:
            raise UsageError("States that are not all float32 cannot be packed for this runtime.")
        sizes = [prod(int(str(d)) for d in s.shape[1:]) for s in states]
        recurrent = [f(0, "recurrent_state") for f in (PAST.format, PRESENT.format)]
        self._swap_ends(states, recurrent, [1, 1, sum(sizes)])
        flat = [f"{s.past}/flat" for s in states]
        split = self._constant("pack/sizes", sizes)
        self.before.append(helper.make_node("Split", [recurrent[0], split], flat, axis=3))
        for state, piece in zip(states, flat, strict=True):
            shape = self._constant(f"{state.past}/shape", [0, *state.shape[1:]])
            self.before.append(helper.make_node("Reshape", [piece, shape], [state.past]))
        row = self._constant("pack/row", [0, 1, 1, -1])
        rows = [f"{s.present}/flat" for s in states]
        for state, piece in zip(states, rows, strict=True):
            self.after.append(helper.make_node("Reshape", [state.present, row], [piece]))
        self.after.append(helper.make_node("Concat", rows, [recurrent[1]], axis=3))
        conv = [f(0, "conv_state") for f in (PAST.format, PRESENT.format)]
        self._swap_ends([], conv, [1, 1])
        self.after.append(helper.make_node("Identity", [conv[0]], [conv[1]]))

    def _swap_ends(
        self, states: Sequence[State], names: Sequence[str], sizes: Sequence[int]
    ) -> None:
        """One input and one output in the place of those of ``states``."""
        gone = {name for s in states for name in (s.past, s.present)}
        for infos, name in zip((self.graph.input, self.graph.output), names, strict=True):
            kept = [i for i in infos if i.name not in gone]
            new = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *sizes])
            del infos[:]
            infos.extend([*kept, new])

    def _mask(self, held: Sequence[State]) -> None:
        """The mask of all tokens -> that of the past ones and that of the new ones."""
        total = f"{MASK}/total"
        for node in nodes_within(self.graph.node):
            node.input[:] = [f"{MASK}/new" if name == MASK else name for name in node.input]
        info = next(i for i in self.graph.input if i.name == MASK)
        info.type.tensor_type.shape.dim[1].dim_param = "total"
        axis, zero = self._constant("mask/axis", [1]), self._constant("mask/zero", [0])
        self.before += [
            helper.make_node("Shape", [self.tokens], ["mask/length"], start=1, end=2),
            helper.make_node("Shape", [MASK], [total], start=1, end=2),
            helper.make_node("Sub", [total, "mask/length"], ["mask/start"]),
            helper.make_node("Slice", [MASK, "mask/start", total, axis], [f"{MASK}/new"]),
        ]
        for state in held:
            self.before.append(
                helper.make_node("Slice", [MASK, zero, "mask/start", axis], [state.past])
            )
            for infos in (self.graph.input, self.graph.output):
                kept = [i for i in infos if i.name not in (state.past, state.present)]
                del infos[:]
                infos.extend(kept)

    def _constant(self, name: str, values: Sequence[Any]) -> str:
        array = np.asarray(values, np.int64)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


def _config(manifest: manifests.Manifest, states: Sequence[State], source: Path) -> dict[str, Any]:
    """genai_config.json."""
    language = language_interface(manifest)
    keys = {layer: s for s in states for kind, layer in [_rows(s) or ("", 0)] if kind == "key"}
    first = next(iter(keys.values()), None)
    heads, width = (first.shape[1], first.shape[3]) if first else (1, 1)
    settings = model_config(source, manifest.files)
    context = settings.get("max_position_embeddings") or CONTEXT
    ends = sorted(end_tokens(source, manifest.files))
    layers = keys.keys() | set(range(len(_pairs(states) or [1])))
    decoder = {
        "session_options": {"log_id": "linexport", "provider_options": []},
        "filename": manifests.MODEL,
        "hidden_size": settings.get("hidden_size", 1),
        "num_attention_heads": settings.get("num_attention_heads", heads),
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
            "context_length": context,
            "bos_token_id": settings.get("bos_token_id") or 0,
            "eos_token_id": ends,
            "pad_token_id": settings.get("pad_token_id") or 0,
            "decoder": decoder,
        },
        "search": {"do_sample": False, "max_length": context, "past_present_share_buffer": False},
    }
