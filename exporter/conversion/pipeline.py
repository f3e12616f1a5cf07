"""The whole way: source -> checked and measured artifact, in the output's place.

    options and source  ->  a job  ->  its stages, see ``run``  ->  reports  ->  the output

Everything is written to a temporary folder that takes the place of the output at the very end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from linexport import passes, targets
from linexport.artifact import write
from linexport.artifact.checked import checked_artifact
from linexport.conversion import isolated
from linexport.conversion.add_records import Measuring
from linexport.conversion.context import Checks, Job, load_original
from linexport.conversion.engines import options_of
from linexport.conversion.openable import OpenableManifest
from linexport.conversion.proof_strategy import announced
from linexport.conversion.publish import check_place, publish
from linexport.conversion.quantize import check_head, check_quantisation, quantize
from linexport.conversion.revalidate import measure_again, reopen
from linexport.conversion.run import run
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import dims as dimensions
from linexport.manifest import ConvertOptions, Manifest
from linexport.manifest.options import (
    FLOAT32,
    KEEP,
    BenchExtent,
    Pooling,
    Precision,
    Proof,
    TargetName,
    Weights,
    command,
    defaults,
)
from linexport.quantization.by_target import check_gpus
from linexport.quantization.half import HALF
from linexport.quantization.keep import check_checkpoint
from linexport.quantization.token_windows import read_text
from linexport.sources import LoadedModel, is_factory, load_model, objects
from linexport.sources.callables import without_arguments
from linexport.sources.checkpoint_weights import checkpoint_weights
from linexport.sources.hugging_face import declared_head, hub
from linexport.sources.metric import as_metric, check_drop
from linexport.sources.packed import StoredWeights
from linexport.system.progress import Progress, Silent, Stopwatch
from linexport.timing.latency import EXTENTS

FOR_WEIGHTS = ("data", "max_kld", "evaluate", "max_drop", "proof")
"""Options that go with quantised weights alone."""


@objects.takes_examples
def convert(
    source: object,
    output: str | Path | None = None,
    *,
    args: tuple[object, ...] | None = None,
    kwargs: Mapping[str, object] | None = None,
    dynamic_shapes: object = None,
    target: TargetName = "ort",
    precision: Precision = "fp32",
    weights: Weights = FLOAT32,
    data: str | Path | None = None,
    max_kld: float | None = None,
    evaluate: str | None = None,
    lower_is_better: bool = False,
    max_drop: float | None = None,
    proof: Proof | None = None,
    inline: bool = False,
    sms: Iterable[int] = (),
    plugins: bool = True,
    quick: bool = False,
    timing_cache: str | Path | None = None,
    packed_batches: bool = False,
    state_dict: str | Path | None = None,
    inputs: Iterable[str] = (),
    pooling: Pooling | None = None,
    vision: bool = True,
    mtp: bool = True,
    dims: Iterable[str] = (),
    tune: bool = False,
    bench: BenchExtent | bool = "short",
    lengths: Iterable[int] | None = None,
    threads: int = 0,
    seed: int = 0,
    dump_passes: str | Path | None = None,
    stop_after: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    download: bool = False,
    revision: str | None = None,
    stand_ins: bool = False,
    isolated: bool = False,
    max_memory: int | None = None,
    max_seconds: int | None = None,
    max_file: int | None = None,
    progress: Progress | None = None,
) -> OpenableManifest:
    """Convert a model to an artifact folder and prove it equal to the original.

    Args:
        source: a linexport checkpoint, an exported program, a Hugging Face model folder, a
            model folder of diffusers, ``package.module:function`` or ``file.py:Class``; or an
            object: a ``torch.nn.Module`` with ``args``, (module, args), (module, args, kwargs), a
            function that returns one of these, a ``torch.export.ExportedProgram`` or a causal
            language model of transformers. Objects are not changed.
        output: the folder to make; by default the name of the source with ".artifact".
        args: positional example inputs of a module. They may also stand behind it, as for
            torch.export: convert(module, (x,), {"mask": m}, output="artifact").
        kwargs: example inputs by name.
        dynamic_shapes: sizes of the inputs that vary, in ``torch.export.export``'s notation; by
            default the batch and the tokens, and {} for none.
        target: Where it will run.
        precision: For engines and ort-cuda: fp32, fp16 or bf16. States are float32, but for keys
            and values of ort-cuda in fp16.
        weights: float32, or what precision says; int8 or int4; auto, 4 or 8 bits for each weight
            until max_kld holds. For engines: fp8. For ort and onnx: fp16 or bf16, computed with in
            float32; or keep, the integers of a quantised checkpoint.
        data: Text to choose values by and to compare on: a UTF-8 file, or a folder of .txt files.
            Without it, the source of Python's standard library.
        max_kld: Largest mean KL divergence from the float32 model, in nats. More is exit code 3.
        evaluate: For weights in fewer bits: a score of an opened artifact, package.module:evaluate,
            measured on the float32 one and on the new one.
        lower_is_better: The score of evaluate is a loss.
        max_drop: With evaluate: by how much the score may get worse. More is exit code 3.
        proof: With weights="int4", int8 or keep, of a Hugging Face folder: whole compares the whole
            float32 model with the original; layers compares one layer at a time, which takes less
            memory. By default layers where memory is short, else whole.
        inline: Write no ONNX functions, and a shape for every value, for runtimes that need that.
        sms: For engines, and kernels of ort-cuda: compute capabilities of the GPUs, such as 89,120,
            or GPUs by name, such as l4,orin.
        plugins: For engines: run linear attention by linexport's kernels.
        quick: For tensorrt: put the kernel into the engine where one suffices. The engine then runs
            without a plugin library.
        timing_cache: For tensorrt: file of kernels' times that builds share; made if new.
        packed_batches: For ort-cuda: calls take sequences of different lengths side by side,
            without padding.
        state_dict: For file.py:Class: file of its weights, written by torch.save or safetensors,
            which is read as data.
        inputs: For file.py:Class: an example input of its forward, NAME=DTYPE[SIZES], such as
            x=float32[2,16,64]; may be repeated. Where sizes have names, those vary:
            x=float32[batch=2,3,height=64]. Integers are rows of an embedding, or below N:
            n=int64[2]:N, N a number or such a name.
        pooling: For a base model in a Hugging Face folder: one vector for each sequence, in place
            of its hidden states. mean is over tokens that are not padding; last is the last of
            these, cls the first.
        vision: Export the vision tower of a checkpoint that has one; the model then takes images.
            Engines and proof="layers" take text alone.
        mtp: Export the head for multi-token prediction of a checkpoint that has one, for generate
            --draft mtp. Engines and proof="layers" take none.
        dims: Range of a dynamic dimension, NAME=MIN:OPT:MAX; may be repeated.
        tune: Choose lowerings by measuring them on this machine.
        bench: short measures latency at two lengths, full at four, and peak memory; none
            nothing.
        lengths: Sequence lengths to measure at, such as 128,1024,4096.
        threads: Threads of everything measured; 0 for each one's own choice.
        seed: Seed of all random inputs; recorded.
        dump_passes: New folder for the graph before and after each pass that changes it, with a
            readable difference.
        stop_after: With dump_passes: name of the last pass to run. No artifact is made.
        overwrite: Replace an earlier artifact once this one is complete.
        trust_remote_code: Run the Python code in a Hugging Face model folder. It can do whatever
            you can.
        download: Fetch a model that is named as on the Hugging Face hub, org/model: configuration,
            tokenizer and safetensors, no code. The manifest records the commit.
        revision: Commit, branch or tag of such a model, fetched or in the cache.
        stand_ins: For file.py:Class: where its code imports mamba_ssm, causal_conv1d, fla or an
            extension for selective scans that is not installed, or compiles the wkv of RWKV-4,
            compute their kernels in PyTorch.
        isolated: Convert in a process of its own, without network, that reads and writes nothing
            else; a crash is an error. For models of strangers.
        max_memory: For isolated=True: GiB of memory it may take.
        max_seconds: For isolated=True: seconds it may take.
        max_file: For isolated=True: GiB of each file it may write.
        progress: shown the stages.

    Returns:
        The manifest. Its ``status`` is "ok" or "parity_failed"; a failed artifact is kept, at
        ``output`` or, if that would replace an earlier artifact, at ``output`` plus ".failed".
        ``artifact`` says where, and ``load()`` opens it.

    Raises:
        UsageError: the source is something else, or an option does not go with it.
        StoppedAfterPass: ``stop_after`` requests it.
        LinexportError: see its subclasses; nothing is left behind.
    """
    given = locals()
    config = ConvertOptions(**{name: given[name] for name in defaults()})
    source = objects.with_examples(source, args, kwargs, dynamic_shapes)
    if not isinstance(source, str | Path):
        source = load_model(source, seed=config.seed, **config.loading)
    place = default_output(source) if output is None else output
    if config.download and config.trust_remote_code:
        raise UsageError(
            f"--download fetches no code. Leave --trust-remote-code out, or run `hf download "
            f"{source}` first and leave --download out."
        )
    here = hub.resolved(source, config.download, config.revision, as_folder=config.isolated)
    return OpenableManifest.of(convert_checked(here, place, config, Checks(), progress))


def default_output(source: str | Path | LoadedModel) -> Path:
    """Return the folder, in the current one, that a source is converted to by default.

    model.pt becomes model.artifact, a folder models/small small.artifact, package.module:make
    make.artifact, and an object of the class Small Small.artifact.
    """
    if isinstance(source, LoadedModel) or is_factory(source):
        name = re.split("[:.]", without_arguments(_named(source)))[-1]
    else:
        path = Path(source)
        name = path.stem if path.is_file() else path.absolute().name
        if hub.is_hub_name(source) and not path.exists():
            name = name.partition("@")[0]
    return Path(f"{name}.artifact")


def convert_checked(
    source: str | Path | LoadedModel,
    output: str | Path,
    config: ConvertOptions,
    checks: Checks,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a source or a loaded model, with other checks; else like ``convert``."""
    place = Path(output)
    if config.bench not in get_args(BenchExtent):
        expected = ", ".join(get_args(BenchExtent))
        raise UsageError(f"--bench is {config.bench!r}; expected one of {expected}.")
    if config.weights != FLOAT32:
        return _quantised(source, place, config, progress)
    if any(getattr(config, name) is not None for name in FOR_WEIGHTS):
        raise UsageError(
            "--data, --max-kld, --evaluate, --max-drop and --proof are for quantised weights: pass "
            "--weights as well."
        )
    _configured(_named(source), place, config)
    dimensions.parse(config.dims)
    check_place(place, config.overwrite, _named(source))
    _dump(config)
    shown = progress or Silent()
    with write.staged(place) as folder:
        if config.isolated:
            if isinstance(source, LoadedModel):
                raise UsageError(
                    f"An isolated conversion loads the model in another process; {_named(source)} "
                    "is an object of this one. Name a file or package.module:callable."
                )
            manifest = isolated.run(_named(source), place, config, folder, shown)
        else:
            job = job_of(source, place, config, folder, shown)
            manifest = run(replace(job, checks=checks))
        return publish(folder, place, manifest)


def _quantised(
    source: str | Path | LoadedModel, place: Path, config: ConvertOptions, progress: Progress | None
) -> Manifest:
    """Convert to float32 in a folder next to the output, prove that, and quantise it."""
    check_quantisation(config.weights, config.target, config.max_kld)
    check_gpus(config.target, config.weights, config.sms)
    _configured(_named(source), place, config)
    check_drop(config.evaluate, config.max_drop)
    metric = as_metric(config.evaluate, config.lower_is_better)
    check_place(place, config.overwrite, _named(source))
    if config.data is not None:  # before the long work that comes first
        read_text(Path(config.data))
    head = declared_head(source, config.pooling)
    if head is not None:  # others are known once they are loaded
        check_head(config.weights, config.max_kld, head)
    checkpoint = _checkpoint(source, config) if config.weights == KEEP else None
    by_layers = announced(source, place, config, progress or Silent())
    plain = {**dict.fromkeys(FOR_WEIGHTS), "weights": FLOAT32, "bench": False}
    with write.staged(place) as folder:
        exact = folder / "float32"
        plainly = ConvertOptions(**{**vars(config), **plain})
        checks = Checks(by_layers=by_layers, builds=False)
        manifest = convert_checked(source, exact, plainly, checks, progress)
        if manifest.status != "ok":
            return publish(exact, place, replace(manifest, options=config))
        manifest = quantize(
            exact,
            place,
            weights=config.weights,
            data=config.data,
            max_kld=config.max_kld,
            evaluate=metric,
            max_drop=config.max_drop,
            threads=config.threads,
            seed=config.seed,
            overwrite=config.overwrite,
            progress=progress,
            options=config,
            original=_in_half(source, config),
            checkpoint=checkpoint,
        )
    if not config.measures or by_layers:  # the original would be in memory as a whole
        return manifest
    watch = Stopwatch(progress or Silent())
    checked = checked_artifact(Path(manifest.artifact), None)
    tested = reopen(checked, source, config.threads, config.trust_remote_code, watch)
    how = Measuring(config.lengths, EXTENTS[config.extent].on(config.threads), config.seed)
    return measure_again(checked, tested, how, watch)


def _checkpoint(source: str | Path | LoadedModel, config: ConvertOptions) -> StoredWeights:
    """The stored weights of a source, some of which can be kept as they are.

    Raises:
        UsageError: it is not a quantised checkpoint, or the conversion is isolated.
    """
    if config.isolated:
        raise UsageError(
            "--weights keep reads the checkpoint again, outside of the process of --isolated. "
            "Leave out one of them."
        )
    stored = checkpoint_weights(_named(source), config.trust_remote_code)
    check_checkpoint(stored, _named(source))
    return stored


def _in_half(source: str | Path | LoadedModel, config: ConvertOptions) -> LoadedModel | None:
    """The original where its own half precision is what weights are judged by."""
    return load_original(source, config) if config.weights in HALF else None


def _configured(source: str, output: Path, config: ConvertOptions) -> targets.Target:
    """The target with its options; what it lacks here comes with the command for elsewhere."""
    target = targets.find_target(config.target)
    if config.inline and target.deploy is not None:
        raise UsageError(
            f"--inline is for ONNX models; target {target.name} builds engines, whose plugins take "
            "the place of the functions."
        )
    if config.inline and config.packed_batches:
        raise UsageError("--inline puts bodies in the place of nodes, and --packed-batches others.")
    try:
        return target.configure(
            target,
            options_of(config),
        )
    except EnvironmentProblemError as error:
        raise EnvironmentProblemError(
            f"{error}\nOn a machine that has what is missing, this makes the artifact: "
            f"{command(source, str(output), config)}"
        ) from None


def _dump(config: ConvertOptions) -> passes.GraphDump | None:
    """The folder for dumps, made; the pass to stop after is known."""
    if config.stop_after is not None:
        passes.find_pass(config.stop_after, config.target)
        if config.dump_passes is None:
            raise UsageError(
                "--stop-after leaves its result in the folder of --dump-passes, and none was "
                "given. Add --dump-passes DIR."
            )
    return None if config.dump_passes is None else passes.GraphDump(Path(config.dump_passes))


def _named(source: str | Path | LoadedModel) -> str:
    return source.source.location if isinstance(source, LoadedModel) else str(source)


def job_of(
    source: str | Path | LoadedModel,
    output: Path,
    config: ConvertOptions,
    folder: Path,
    shown: Progress,
) -> Job:
    """Return the conversion of ``source`` into ``folder``, which becomes ``output``."""
    target, ranges = _configured(_named(source), output, config), dimensions.parse(config.dims)
    return Job(source, config, target, ranges, folder, Stopwatch(shown), _dump(config))
