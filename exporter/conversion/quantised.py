"""Compare a quantised artifact with its original in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from numpy.typing import NDArray

from linexport import parity
from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run, runs
from linexport.errors import UsageError
from linexport.manifest import MODEL, Manifest
from linexport.manifest.quantisation import TextRecord
from linexport.parity.reference.module import Reference
from linexport.quantization.by_target import FORMS
from linexport.quantization.calibration_inputs import inputs_of
from linexport.quantization.half import HALF
from linexport.quantization.opened import beyond_profiles, open_deployed, open_exactly
from linexport.quantization.proof import Runs, with_proof
from linexport.quantization.token_windows import read_text
from linexport.system.torch_internals.trees import pytree

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def with_quantisation_checked(
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    folder: Path,
    data: Path | None,
    threads: int,
    seed: int,
) -> Manifest:
    """Compare a quantised artifact with the original that its manifest names.

    Args:
        manifest: of the artifact.
        tested: the artifact with its original.
        folder: of the artifact.
        data: text to compare on; None for that of the conversion.
        threads: 0 for ONNX Runtime's choice.
        seed: of drawn inputs and of the places to split sequences at.
    """
    record = manifest.quantisation
    assert record is not None
    session = open_deployed(folder / MODEL, manifest, threads, tested.execution)
    artifact = Artifact(folder, beyond_profiles(manifest), session)
    rounds = record.weights not in HALF and FORMS[manifest.target].on_cpu
    exact = partial(open_exactly, folder / MODEL, threads) if rounds else None
    original, name = run_original(tested, torch.float32), "the original in PyTorch"
    half = run_in_half(tested, record.weights)
    both = Runs(original, runs(session), exact, name, half, streams=False)
    text, instead = (data, "") if data is not None else _text_again(record.text)
    inputs = inputs_of(artifact, text, seed)
    inputs = replace(inputs, description=inputs.description + instead)
    return replace(manifest, quantisation=with_proof(record, artifact, both, inputs, seed))


def _text_again(recorded: TextRecord | None) -> tuple[Path | None, str]:
    """Return the recorded text if it is still the same, else a note that the text differs."""
    if recorded is None:
        return None, ""
    place = Path(recorded.location)
    try:
        if read_text(place)[1] == recorded:
            return place, ""
        why = "has changed"
    except UsageError:
        why = "cannot be read"
    return None, f", not {place} as before, which {why}; --data names text"


def run_in_half(tested: parity.ModelUnderTest, weights: str) -> Run | None:
    """Return the original in the half precision of the weights; None for others."""
    return run_original(tested, DTYPES[weights]) if weights in DTYPES else None


def run_original(tested: parity.ModelUnderTest, dtype: torch.dtype) -> Run:
    """Return a function from the graph's inputs to the original's outputs, by their names."""
    reference = Reference(tested.loaded, dtype)
    leaves, structure = pytree.tree_flatten((tested.loaded.args, tested.loaded.kwargs))

    def run(feeds: Arrays) -> dict[str, NDArray]:
        names = iter(tested.input_names)
        given = [
            torch.from_numpy(feeds[next(names)]) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        outputs = reference(pytree.tree_unflatten(given, structure))
        return dict(zip(tested.output_names, outputs, strict=True))

    return run
