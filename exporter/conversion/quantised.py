"""A quantised artifact beside its original in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import torch
from torch.utils import _pytree as pytree

from linexport import parity, targets
from linexport.artifact.runtime import Artifact
from linexport.manifest import MODEL, Manifest
from linexport.parity.reference import Reference
from linexport.quantise.calibration_inputs import inputs_of
from linexport.quantise.opened import Arrays, Run
from linexport.quantise.proof import Runs, with_proof
from linexport.quantise.rewrite import float_activations


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
        tested: the artifact beside its original.
        folder: of the artifact.
        data: text to compare on; None for Python's own source.
        threads: 0 for ONNX Runtime's choice.
        seed: of drawn inputs and of the places to split sequences at.
    """
    assert manifest.quantisation is not None
    target = targets.find(manifest.target)
    session = tested.open()
    artifact = Artifact(folder, manifest, session)
    exact = float_activations(onnx.load_model(str(folder / MODEL)))
    unrounded = target.open(exact.SerializeToString(), threads=threads, taking_turns=True)
    runs = Runs(_original(tested), session.run, unrounded.run, "the original in PyTorch")
    inputs = inputs_of(artifact, data, seed)
    record = with_proof(manifest.quantisation, artifact, runs, inputs, seed)
    return replace(manifest, quantisation=record)


def _original(tested: parity.ModelUnderTest) -> Run:
    """Return a function from the graph's inputs to the original's outputs, by their names."""
    reference = Reference(tested.loaded, torch.float32)
    leaves, structure = pytree.tree_flatten((tested.loaded.args, tested.loaded.kwargs))

    def run(feeds: Arrays) -> dict[str, object]:
        names = iter(tested.input_names)
        given = [
            torch.from_numpy(feeds[next(names)]) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        outputs = reference(pytree.tree_unflatten(given, structure))
        return dict(zip(tested.output_names, outputs, strict=True))

    return run  # type: ignore[return-value]
