"""Options of a conversion, declared once.

    ConvertOptions -> the keywords of linexport.convert, the command line of ``linexport convert``,
                      the command that repeats a conversion elsewhere, and the manifest's record

Each field carries its default, its help text and the way the command line spells it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

OPTION_KEY = "option"
"""Key of a field's metadata under which its ``CommandLineOption`` is kept."""

Form = Literal["single", "commas", "repeated"]

TargetName = Literal["onnx", "onnx27", "ort", "ort-cuda", "tensorrt", "tensorrt-rtx"]
"""Targets of linexport; other packages may add some, which a type checker does not know."""

Precision = Literal["fp32", "fp16", "bf16"]
Weights = Literal["float32", "fp16", "bf16", "int8", "int4", "auto"]
Pooling = Literal["mean", "last", "cls"]
Proof = Literal["whole", "layers"]

FLOAT32: Final = "float32"
"""Weights as they are proven equal to the original's."""


@dataclass(frozen=True)
class CommandLineOption:
    """The command line's side of a field.

    Attributes:
        flag: with its dashes.
        help: a sentence or two.
        form: how several values are given: ``--sm 89,120`` or ``--dim a=1:2:3 --dim b=1:2:3``.
        min: smallest integer allowed.
        example: a value, for errors.
    """

    flag: str
    help: str
    form: Form = "single"
    min: int | None = None
    example: str = ""


def _option(default: Any, flag: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata={OPTION_KEY: CommandLineOption(flag, help, **more)})


@dataclass(frozen=True)
class ConvertOptions:
    """Everything ``convert`` may be asked for beside its source and output."""

    target: str = _option("ort", "--target", "Where it will run.")
    precision: str = _option(
        "fp32",
        "--precision",
        "For engines and ort-cuda: fp32, fp16 or bf16. States stay in float32.",
    )
    weights: str = _option(
        FLOAT32,
        "--weights",
        "For ort and onnx: float32; fp16 or bf16, stored so and computed with in float32; int8 or "
        "int4; or auto, 4 or 8 bits for each weight, 8 where they buy most, until --max-kld holds.",
    )
    data: str | None = _option(
        None,
        "--data",
        "With --weights: text to choose values by and to compare on, a UTF-8 file or a folder of "
        ".txt files. Without it, the source of Python's standard library.",
    )
    max_kld: float | None = _option(
        None,
        "--max-kld",
        "With --weights: largest mean KL divergence from the float32 model, in nats; more is exit "
        "code 3.",
    )
    evaluate: str | None = _option(
        None,
        "--evaluate",
        "For weights in fewer bits: package.module:evaluate, a score of an opened artifact, "
        "measured on the float32 one and on the new one.",
    )
    lower_is_better: bool = _option(False, "--lower-is-better", "That score is a loss.")
    max_drop: float | None = _option(
        None,
        "--max-drop",
        "With --evaluate: by how much the score may get worse; more is exit code 3.",
    )
    proof: str | None = _option(
        None,
        "--proof",
        "With --weights int4 or int8, of a Hugging Face folder: whole compares the float32 model "
        "with the original as a whole; layers, each of its layers in turn, on what the original's "
        "layers before it compute, which takes less memory. By default layers where memory is "
        "short, else whole.",
    )
    inline: bool = _option(
        False,
        "--inline",
        "Without functions: each body in the place of its node, and a shape for every value, for "
        "runtimes that need that.",
    )
    sms: tuple[int, ...] = _option(
        (),
        "--sm",
        "For engines, and kernels of ort-cuda: compute capabilities of the GPUs, such as 89,120, "
        "or GPUs by name, such as l4,orin.",
        form="commas",
        example="89,120",
    )
    plugins: bool = _option(
        True, "--plugins", "For engines: run linear attention by linexport's kernels."
    )
    quick: bool = _option(
        False,
        "--quick",
        "For tensorrt: where one kernel suffices, put it into the engine, which then runs without "
        "a plugin library.",
    )
    timing_cache: str | None = _option(
        None,
        "--timing-cache",
        "For tensorrt: file of kernels' times that builds share; made if new.",
    )
    packed_batches: bool = _option(
        False,
        "--packed-batches",
        "For ort-cuda: calls take sequences of different lengths side by side, without padding.",
    )
    pooling: str | None = _option(
        None,
        "--pooling",
        "For a base model in a Hugging Face folder: one vector for each sequence, pooled, in place "
        "of its hidden states: mean, over tokens that are not padding; last, of the last of these; "
        "cls, of the first.",
    )
    vision: bool = _option(
        True,
        "--vision",
        "Of a checkpoint with a vision tower: export the tower beside the language model, which "
        "then takes images. Engines and --proof layers take text alone in any case.",
    )
    mtp: bool = _option(
        True,
        "--mtp",
        "Of a checkpoint with a head for multi-token prediction: export the head beside the model, "
        "for generate --draft mtp. Engines and --proof layers take none in any case.",
    )
    dims: tuple[str, ...] = _option(
        (),
        "--dim",
        "Range of a dynamic dimension, NAME=MIN:OPT:MAX; may be repeated.",
        form="repeated",
    )
    tune: bool = _option(False, "--tune", "Choose lowerings by measuring them on this machine.")
    bench: bool = _option(True, "--bench", "Measure latency and memory.")
    lengths: tuple[int, ...] | None = _option(
        None,
        "--lengths",
        "Sequence lengths to measure at, such as 128,1024,4096.",
        form="commas",
        example="128,1024",
    )
    threads: int = _option(
        0, "--threads", "Threads of everything measured; 0 for each one's own choice.", min=0
    )
    seed: int = _option(0, "--seed", "Seed of all random inputs; recorded.")
    dump_passes: str | None = _option(
        None,
        "--dump-passes",
        "New folder for the graph before and after each pass that changes it, with a readable "
        "difference.",
    )
    stop_after: str | None = _option(
        None,
        "--stop-after",
        "Name of the last pass to run; its graph is in the folder of --dump-passes, and no "
        "artifact is made.",
    )
    overwrite: bool = _option(
        False, "--overwrite", "Replace an earlier artifact once this one is complete."
    )
    trust_remote_code: bool = _option(
        False,
        "--trust-remote-code",
        "Run the Python code that a Hugging Face model folder brings along: whatever its author "
        "wrote there can do what you can.",
    )
    isolated: bool = _option(
        False,
        "--isolated",
        "Convert in a process of its own, without network, that reads and writes nothing else; a "
        "crash is an error. For models of strangers.",
    )
    max_memory: int | None = _option(
        None, "--max-memory", "For --isolated: GiB of memory it may take.", min=1
    )
    max_seconds: int | None = _option(
        None, "--max-seconds", "For --isolated: seconds it may take.", min=1
    )
    max_file: int | None = _option(
        None, "--max-file", "For --isolated: GiB of each file it may write.", min=1
    )

    def __post_init__(self) -> None:
        """Take any iterable where a tuple is kept, none of it being the default, and any path."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and one.metadata[OPTION_KEY].form != "single":
                object.__setattr__(self, one.name, tuple(value) or one.default)
        for name in ("timing_cache", "dump_passes", "data"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)))


def defaults() -> dict[str, Any]:
    """The default of every field, by its name."""
    return {one.name: one.default for one in fields(ConvertOptions)}


def declared() -> dict[str, CommandLineOption]:
    """The command line's side of every field, by the field's name."""
    return {one.name: one.metadata[OPTION_KEY] for one in fields(ConvertOptions)}


def command(source: str, output: str, options: ConvertOptions) -> str:
    """The command line that converts ``source`` with these options, quoted for a shell."""
    words = ["linexport", "convert", source, "--output", output]
    for one in fields(options):
        value = getattr(options, one.name)
        if value != one.default:
            words += _words(one.metadata[OPTION_KEY], value)
    return shlex.join(words)


def _words(option: CommandLineOption, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option.flag if value else f"--no-{option.flag.removeprefix('--')}"]
    if option.form == "repeated":
        return [word for item in value for word in (option.flag, item)]
    if option.form == "commas":
        return [option.flag, ",".join(map(str, value))]
    return [option.flag, str(value)]
