"""Options of a conversion, declared once.

    ConvertOptions -> the keywords of linexport.convert, the command line of ``linexport convert``,
                      the command that repeats a conversion elsewhere, and the manifest's record

Each field carries its default, its help text and the way the command line spells it.
"""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args

from linexport.option_names import Keyword, add_keyword

OPTION_KEY = "option"
"""Key of a field's metadata under which its ``CommandLineOption`` is kept."""

Form = Literal["single", "commas", "repeated"]

TargetName = Literal["onnx", "onnx27", "ort", "ort-cuda", "tensorrt", "tensorrt-rtx"]
"""Targets of linexport; other packages may add some, which a type checker does not know."""

Precision = Literal["fp32", "fp16", "bf16"]
Weights = Literal["float32", "fp16", "bf16", "int8", "int4", "fp8", "auto", "keep"]
Pooling = Literal["mean", "last", "cls"]
Proof = Literal["whole", "layers"]
BenchExtent = Literal["none", "short", "full"]

FLOAT32: Final = "float32"
"""Weights as they are proven equal to the original's."""

KEEP: Final = "keep"
"""Weights with the integers of a quantised checkpoint."""


class Panel(enum.StrEnum):
    """Headings under which ``--help`` lists options, in this order."""

    COMMON = "Most used"
    INPUT = "Input"
    OUTPUT = "Output"
    TARGET = "Target"
    WEIGHTS = "Weights"
    MAPS = "Feature maps"
    SEARCH = "Search"
    FEED_FORWARD = "Feed-forward layers"
    DECODING = "Decoding"
    SEQUENCES = "Sequences"
    REQUESTS = "Requests"
    CHECKS = "Checks and measurements"
    SIGNATURES = "Signatures"
    ISOLATION = "Isolation"
    DEBUGGING = "Debugging"


@dataclass(frozen=True)
class CommandLineOption:
    """The command line's side of a field.

    Attributes:
        flag: with its dashes.
        panel: heading of the help under which it is listed.
        help: a sentence or two.
        form: how several values are given: ``--sm 89,120`` or ``--dim a=1:2:3 --dim b=1:2:3``.
        min: smallest integer allowed.
        example: a value, for errors.
        words: values that shells complete, where there are few.
        off: the value that ``--no-`` and the name stand for.
    """

    flag: str
    panel: Panel
    help: str
    form: Form = "single"
    min: int | None = None
    example: str = ""
    words: tuple[str, ...] = ()
    off: str = ""


def _option(default: Any, flag: str, panel: Panel, help: str, **more: Any) -> Any:
    option = CommandLineOption(flag, panel, help, **more)
    return field(default=default, metadata={OPTION_KEY: option})


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion, without its source and output."""

    target: str = _option("ort", "--target", Panel.COMMON, "Where it will run.")
    precision: str = _option(
        "fp32",
        "--precision",
        Panel.COMMON,
        "For engines and ort-cuda: fp32, fp16 or bf16. States are float32, but for keys and "
        "values of ort-cuda in fp16.",
        words=get_args(Precision),
    )
    weights: str = _option(
        FLOAT32,
        "--weights",
        Panel.COMMON,
        "float32, or what --precision says; int8 or int4; auto, 4 or 8 bits for each weight until "
        "--max-kld holds. For engines: fp8. For ort and onnx: fp16 or bf16, computed with in "
        "float32; or keep, the integers of a quantised checkpoint.",
        words=get_args(Weights),
    )
    data: str | None = _option(
        None,
        "--data",
        Panel.WEIGHTS,
        "Text to choose values by and to compare on: a UTF-8 file, or a folder of .txt files. "
        "Without it, the source of Python's standard library.",
    )
    max_kld: float | None = _option(
        None,
        "--max-kld",
        Panel.WEIGHTS,
        "Largest mean KL divergence from the float32 model, in nats. More is exit code 3.",
    )
    evaluate: str | None = _option(
        None,
        "--evaluate",
        Panel.CHECKS,
        "For --weights in fewer bits: a score of an opened artifact, package.module:evaluate, "
        "measured on the float32 one and on the new one.",
    )
    lower_is_better: bool = _option(
        False, "--lower-is-better", Panel.CHECKS, "The score of --evaluate is a loss."
    )
    max_drop: float | None = _option(
        None,
        "--max-drop",
        Panel.CHECKS,
        "With --evaluate: by how much the score may get worse. More is exit code 3.",
    )
    proof: str | None = _option(
        None,
        "--proof",
        Panel.CHECKS,
        "With --weights int4, int8 or keep, of a Hugging Face folder: whole compares the whole "
        "float32 model with the original; layers compares one layer at a time, which takes less "
        "memory. By default layers where memory is short, else whole.",
        words=get_args(Proof),
    )
    inline: bool = _option(
        False,
        "--inline",
        Panel.OUTPUT,
        "Write no ONNX functions, and a shape for every value, for runtimes that need that.",
    )
    sms: tuple[int, ...] = _option(
        (),
        "--sm",
        Panel.TARGET,
        "For engines, and kernels of ort-cuda: compute capabilities of the GPUs, such as 89,120, "
        "or GPUs by name, such as l4,orin.",
        form="commas",
        example="89,120",
    )
    plugins: bool = _option(
        True,
        "--plugins",
        Panel.TARGET,
        "For engines: run linear attention by linexport's kernels.",
    )
    quick: bool = _option(
        False,
        "--quick",
        Panel.TARGET,
        "For tensorrt: put the kernel into the engine where one suffices. The engine then runs "
        "without a plugin library.",
    )
    timing_cache: str | None = _option(
        None,
        "--timing-cache",
        Panel.TARGET,
        "For tensorrt: file of kernels' times that builds share; made if new.",
    )
    packed_batches: bool = _option(
        False,
        "--packed-batches",
        Panel.TARGET,
        "For ort-cuda: calls take sequences of different lengths side by side, without padding.",
    )
    state_dict: str | None = _option(
        None,
        "--state-dict",
        Panel.INPUT,
        "For file.py:Class: file of its weights, written by torch.save or safetensors, which is "
        "read as data.",
    )
    inputs: tuple[str, ...] = _option(
        (),
        "--input",
        Panel.INPUT,
        "For file.py:Class: an example input of its forward, NAME=DTYPE[SIZES], such as "
        "x=float32[2,16,64]; may be repeated. Where sizes have names, those vary: "
        "x=float32[batch=2,3,height=64]. Integers are rows of an embedding, or below N: "
        "n=int64[2]:N, N a number or such a name.",
        form="repeated",
    )
    pooling: str | None = _option(
        None,
        "--pooling",
        Panel.OUTPUT,
        "For a base model in a Hugging Face folder: one vector for each sequence, in place of its "
        "hidden states. mean is over tokens that are not padding; last is the last of these, cls "
        "the first.",
        words=get_args(Pooling),
    )
    vision: bool = _option(
        True,
        "--vision",
        Panel.INPUT,
        "Export the vision tower of a checkpoint that has one; the model then takes images. "
        "Engines and --proof layers take text alone.",
    )
    mtp: bool = _option(
        True,
        "--mtp",
        Panel.INPUT,
        "Export the head for multi-token prediction of a checkpoint that has one, for generate "
        "--draft mtp. Engines and --proof layers take none.",
    )
    dims: tuple[str, ...] = _option(
        (),
        "--dim",
        Panel.INPUT,
        "Range of a dynamic dimension, NAME=MIN:OPT:MAX; may be repeated.",
        form="repeated",
    )
    tune: bool = _option(
        False, "--tune", Panel.TARGET, "Choose lowerings by measuring them on this machine."
    )
    bench: str | bool = _option(
        "short",
        "--bench",
        Panel.COMMON,
        "short measures latency at two lengths, full at four, and peak memory; none nothing.",
        words=get_args(BenchExtent),
        off="none",
    )
    lengths: tuple[int, ...] | None = _option(
        None,
        "--lengths",
        Panel.CHECKS,
        "Sequence lengths to measure at, such as 128,1024,4096.",
        form="commas",
        example="128,1024",
    )
    threads: int = _option(
        0,
        "--threads",
        Panel.CHECKS,
        "Threads of everything measured; 0 for each one's own choice.",
        min=0,
    )
    seed: int = _option(0, "--seed", Panel.CHECKS, "Seed of all random inputs; recorded.")
    dump_passes: str | None = _option(
        None,
        "--dump-passes",
        Panel.DEBUGGING,
        "New folder for the graph before and after each pass that changes it, with a readable "
        "difference.",
    )
    stop_after: str | None = _option(
        None,
        "--stop-after",
        Panel.DEBUGGING,
        "With --dump-passes: name of the last pass to run. No artifact is made.",
    )
    overwrite: bool = _option(
        False,
        "--overwrite",
        Panel.COMMON,
        "Replace an earlier artifact once this one is complete.",
    )
    trust_remote_code: bool = _option(
        False,
        "--trust-remote-code",
        Panel.ISOLATION,
        "Run the Python code in a Hugging Face model folder. It can do whatever you can.",
    )
    download: bool = _option(
        False,
        "--download",
        Panel.INPUT,
        "Fetch a model that is named as on the Hugging Face hub, org/model: configuration, "
        "tokenizer and safetensors, no code. The manifest records the commit.",
    )
    revision: str | None = _option(
        None,
        "--revision",
        Panel.INPUT,
        "Commit, branch or tag of such a model, fetched or in the cache.",
    )
    stand_ins: bool = _option(
        False,
        "--stand-ins",
        Panel.INPUT,
        "For file.py:Class: where its code imports mamba_ssm, causal_conv1d, fla or an extension "
        "for selective scans that is not installed, or compiles the wkv of RWKV-4, compute their "
        "kernels in PyTorch.",
    )
    isolated: bool = _option(
        False,
        "--isolated",
        Panel.ISOLATION,
        "Convert in a process of its own, without network, that reads and writes nothing else; a "
        "crash is an error. For models of strangers.",
    )
    max_memory: int | None = _option(
        None, "--max-memory", Panel.ISOLATION, "For --isolated: GiB of memory it may take.", min=1
    )
    max_seconds: int | None = _option(
        None, "--max-seconds", Panel.ISOLATION, "For --isolated: seconds it may take.", min=1
    )
    max_file: int | None = _option(
        None, "--max-file", Panel.ISOLATION, "For --isolated: GiB of each file it may write.", min=1
    )

    def __post_init__(self) -> None:
        """Take any iterable where a tuple is kept, any path, and yes or no to be measured."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and one.metadata[OPTION_KEY].form != "single":
                object.__setattr__(self, one.name, tuple(value) or one.default)
        if isinstance(self.bench, bool):
            object.__setattr__(self, "bench", "short" if self.bench else "none")
        for name in ("timing_cache", "dump_passes", "data", "state_dict"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, str(getattr(self, name)))

    @property
    def measures(self) -> bool:
        """Anything is measured."""
        return self.extent != "none"

    @property
    def extent(self) -> str:
        """One of ``BenchExtent``."""
        return str(self.bench)

    @property
    def loading(self) -> dict[str, Any]:
        """Keywords of ``load_model`` that give the same model again."""
        return {
            "pooling": self.pooling,
            "state_dict": self.state_dict,
            "inputs": self.inputs,
            "stand_ins": self.stand_ins,
        }


def _declare() -> None:
    """Make the options known to messages."""
    for one in fields(ConvertOptions):
        option = one.metadata[OPTION_KEY]
        add_keyword(
            option.flag,
            Keyword(
                one.name,
                option.words or (get_args(TargetName) if one.name == "target" else ()),
                flag=one.default is False,
                several=option.form != "single",
                off=f'"{option.off}"' if option.off else "False",
            ),
        )


_declare()


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
    if value is False or (option.off and value == option.off):
        return [f"--no-{option.flag.removeprefix('--')}"]
    if value is True:
        return [option.flag]
    if option.form == "repeated":
        return [word for item in value for word in (option.flag, item)]
    if option.form == "commas":
        return [option.flag, ",".join(map(str, value))]
    return [option.flag, str(value)]
