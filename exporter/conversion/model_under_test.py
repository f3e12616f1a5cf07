"""manifest, original -> the converted model as parity and timing work on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from linexport import targets
from linexport.graph.dims import DimRange
from linexport.graph.states import State
from linexport.manifest import Manifest
from linexport.manifest.records import TensorRecord, named
from linexport.parity import ModelUnderTest
from linexport.parity.reference.extra_outputs import OpenChanged
from linexport.parity.tolerances import TOLERANCES, Tolerance
from linexport.sources.loaded_model import LoadedModel
from linexport.targets import InferenceSession


def model_under_test(
    manifest: Manifest,
    loaded: LoadedModel,
    open_session: Callable[[], InferenceSession],
    inside: str | None = None,
    open_tower: Callable[[], InferenceSession] | None = None,
    open_changed: OpenChanged | None = None,
) -> ModelUnderTest:
    """Return the converted model of a manifest with its original.

    Args:
        manifest: of the artifact.
        loaded: the original.
        open_session: opens the artifact's model.
        inside: the coarsest dtype that the original computes in; None for that of the last check.
        open_tower: opens the artifact's vision tower, if it has one.
        open_changed: opens the artifact's model with its graph changed.
    """
    if inside is None:
        inside = manifest.parity.tolerance.dtype if manifest.parity else "float32"
    pasts = {s.past for s in manifest.states}
    presents = {s.present for s in manifest.states}
    inputs = [i for i in manifest.inputs if i.name not in pasts]
    outputs = [o for o in manifest.outputs if o.name not in {*presents, manifest.hidden}]
    return ModelUnderTest(
        loaded=loaded,
        open=open_session,
        input_names=[i.name for i in inputs],
        input_shapes=[named(i.shape) for i in inputs],
        output_names=[o.name for o in outputs],
        output_shapes=[o.shape for o in outputs],
        states=[State.from_record(s) for s in manifest.states],
        dims={
            n: DimRange(d.min, d.opt, d.max, d.batch, d.multiple) for n, d in manifest.dims.items()
        },
        traced={n: d.traced for n, d in manifest.dims.items()},
        tolerance=_tolerance(manifest, loaded, inside),
        vision=manifest.vision,
        open_tower=open_tower,
        open_changed=open_changed,
        packed=manifest.packed is not None,
        reaches=manifest.token_flow.reaches if manifest.token_flow else (),
    )


def _tolerance(manifest: Manifest, loaded: LoadedModel, inside: str) -> Tolerance:
    """Return ``tolerance_of`` an artifact; all of it counts as in the precision of its original."""
    found = tolerance_of(manifest.precision, manifest.outputs, inside)
    given = loaded.given
    same = given is not None and given.is_kept and given.name == found.dtype
    return replace(found, whole=True) if same else found


def tolerance_of(
    precision: str, outputs: Iterable[TensorRecord], inside: str = "float32"
) -> Tolerance:
    """The tolerance of the coarsest dtype rounded to: the precision chosen, or an output's.

    Else the limits are those of the coarsest dtype ``inside`` of the model.
    """
    kinds = {targets.DTYPES[precision], *(output.dtype for output in outputs)}
    coarsest = next(k for k in ("bfloat16", "float16", "float32") if k in kinds)
    if coarsest != "float32" or inside == "float32":
        return TOLERANCES[coarsest]
    return replace(TOLERANCES[inside], whole=False)
