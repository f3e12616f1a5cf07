"""``LoadedModel``, which every loader returns: a reference module, its graph, its origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.graph.dims import DimRange, Shape
from linexport.graph.states import State
from linexport.manifest.records import HeadName, KernelRecord, SoftmaxOriginal
from linexport.system.untyped import DynamicShapes, Keywords, Positional

if TYPE_CHECKING:
    import torch

    from linexport.sources.carried_buffers import Buffer
    from linexport.sources.half_precision import AsGiven

Images = Sequence[tuple["torch.Tensor", "torch.Tensor"]]
"""Pixel values (patches, channels) and grid (2,) of each image."""


@dataclass(frozen=True)
class Source:
    """Where a model came from.

    Attributes:
        kind: "checkpoint", "exported_program", "onnx", "hugging_face", "diffusers", "factory" or
            "object".
        location: the path or ``package.module:callable`` as the user gave it; an object's class.
        sha256: of the file with what belongs to it, or None for a factory or an object.
        description: one line for people, for example "LanguageModel, 0.4 M parameters".
        weights_sha256: of the weights that a factory gave, or an object has; None for files.
        linearized: what it is a linear form of; None where it is none.
    """

    kind: str
    location: str
    sha256: str | None
    description: str
    weights_sha256: str | None = None
    linearized: SoftmaxOriginal | None = None


@dataclass(frozen=True)
class OnnxGraph:
    """A graph that needs no tracing.

    Attributes:
        path: of the file; ONNX Runtime runs it as it is.
        nodes: how many it has.
        shapes: of the inputs, in order, with names for dynamic sizes.
        dims: the dynamic dimensions by name.
        sizes: the size each of them has in the example inputs.
        draw: example inputs at any sizes of them, in the order of the inputs.
    """

    path: Path
    nodes: int
    shapes: Sequence[Shape]
    dims: Mapping[str, DimRange]
    sizes: Mapping[str, int]
    draw: Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class DecodeModule:
    """A module that is traced in place of a model whose own code carries states from call to call.

    Attributes:
        module: takes the inputs of the model and then its past states, by name; returns the
            model's outputs and then the present states.
        args: example inputs, among them states in the middle of a sequence.
        dynamic_shapes: in torch.export's notation; dimensions have the names of ``states``.
        outputs: names of all outputs, in order.
        states: by which outputs continue as inputs.
        patched: a context to trace in; every linear state must then be that of a linexport op.
        warnings: what the user should know.
    """

    module: torch.nn.Module
    args: Positional
    dynamic_shapes: DynamicShapes
    outputs: tuple[str, ...]
    states: tuple[State, ...]
    patched: Callable[[], AbstractContextManager[None]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CarriedBuffers:
    """Buffers that a model's own code writes, which become states.

    Attributes:
        buffers: see ``carried_buffers.Buffer``.
        traced: the model that takes past states by name, and returns the present ones last.
        states: of them, in that order.
    """

    buffers: tuple[Buffer, ...]
    traced: LoadedModel
    states: tuple[State, ...]


@dataclass(frozen=True)
class LanguageFacts:
    """Facts of a causal model of tokens: input_ids (B, T), attention_mask (B, T) -> one output.

    Attributes:
        vocabulary: number of tokens.
        context: tokens it was made for, None where nothing limits them.
        layers: names of its layers, in order, as submodules of ``LoadedModel.module``.
        head: what its output is; only a language model's, "causal_lm", chooses further tokens.
    """

    vocabulary: int
    context: int | None
    layers: tuple[str, ...]
    head: HeadName = "causal_lm"


@dataclass(frozen=True)
class VisionTower:
    """The part of a model that turns an image into embeddings of tokens.

    Attributes:
        module: pixel_values (patches, channels), grid (2,) -> image_features (tokens, width), of
            one image of grid[0] x grid[1] patches.
        image_token: id of the tokens whose embeddings these are.
        merge: patches along each side of a token.
        channels: values of a patch.
        width: of the embeddings.
        grid_positions: tokens of an image have the position of its beginning, and their row and
            column; else one after another, as words have.
        inputs: token ids, ``image_token`` and images as the library takes them, by name.
    """

    module: torch.nn.Module
    image_token: int
    merge: int
    channels: int
    width: int
    grid_positions: bool
    inputs: Callable[[torch.Tensor, int, Images], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode with example inputs.

    Attributes:
        module: the reference of every later check; called as ``module(*args, **kwargs)``. That of
            an exported program raises on ``eval()`` and ``train()``, and on sizes that its guards
            exclude; that of an ONNX file runs it in ONNX Runtime, in the dtypes it has.
        args: positional example inputs (tensors, or nests of them as torch.export takes).
        kwargs: keyword example inputs.
        dynamic_shapes: in torch.export's notation: an entry for each of args and then of kwargs,
            or torch's own by name; None where the file already fixes them (an exported program, an
            ONNX file).
        source: provenance.
        program: the exported program itself where the source is one, else None.
        graph: the ONNX graph itself where the source is one, else None.
        integer_ranges: for each integer input, by its position among the flattened inputs, the
            half-open range of values it may take (a vocabulary, say). Absent: the range seen in
            the example.
        places: of integers that number the rows of another input, by position as well, the name of
            the dimension of these rows, which they are below.
        warnings: what the user should know, such as a batch of 1 that was repeated.
        unclear_dims: those of the warnings that say why a dim stays constant, as sizes do not tell.
        carried: buffers that the model writes; None without any. ``module`` begins every call with
            the values that they have at first.
        decode_module: traced instead of ``module``, where the model carries states of its own.
        language: set for a model of tokens, which is then checked as one.
        outputs: names of the outputs; None where nothing names them.
        defaults: values that fill an input the caller leaves out, by name.
        files: copied into the artifact, such as those of a tokenizer.
        vision: a tower whose output the model takes in the place of embeddings of tokens.
        predictor: a head for multi-token prediction, which takes the model's hidden states.
        patched: a context to trace ``module`` in; None: functions of its packages are swapped.
        unread: why the states that the model's library keeps could not be read, so that it is
            traced as any module is; "" where they were, or where there are none.
        kernels: those of GPU libraries that are stood in for while the module runs.
        whole: the model without states, to be traced where ``decode_module`` cannot be, since its
            library lacks what linexport replaces there.
        given: the module as it was given, where that computes in half precision.
        ranges: the usual sizes of dynamic dimensions, by name, where the user gives none; the
            model takes others as well.
    """

    module: torch.nn.Module
    args: Positional
    kwargs: Keywords
    dynamic_shapes: DynamicShapes
    source: Source
    program: torch.export.ExportedProgram | None = None
    graph: OnnxGraph | None = None
    integer_ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unclear_dims: tuple[str, ...] = ()
    carried: CarriedBuffers | None = None
    decode_module: DecodeModule | None = None
    language: LanguageFacts | None = None
    outputs: tuple[str, ...] | None = None
    defaults: Mapping[str, int] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    vision: VisionTower | None = None
    predictor: LoadedModel | None = None
    kernels: tuple[KernelRecord, ...] = ()
    patched: Callable[[], AbstractContextManager[object]] | None = None
    unread: str = ""
    whole: LoadedModel | None = None
    given: AsGiven | None = None
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
