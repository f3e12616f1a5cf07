"""Head for multi-token prediction -> ``mtp.onnx`` in the artifact's folder, and its proof.

The head is compared with the original as a model of its own is, on random tokens and hidden states:
whole sequences, and sequences in pieces with its states. Of the model's hidden states, which it
reads, see ``parity.language.hidden``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from linexport import parity
from linexport.conversion.add_records import placement_of
from linexport.conversion.context import Job
from linexport.conversion.model_under_test import model_under_test
from linexport.conversion.streaming import check_streams
from linexport.conversion.write_submodel import write_beside
from linexport.graph.interface import input_records, tensor_records
from linexport.manifest import Manifest
from linexport.manifest.file_names import MTP, MTP_DATA
from linexport.manifest.records import PredictorRecord
from linexport.parity.language.hidden import check_hidden
from linexport.parity.reference.extra_outputs import OpenChanged
from linexport.sources import LoadedModel
from linexport.sources.hugging_face.heads import HIDDEN
from linexport.targets import InferenceSession


def write_predictor(job: Job, loaded: LoadedModel) -> PredictorRecord | None:
    """Write the head of a model, nothing proven yet; None for a model without one.

    Raises:
        BuildError, UnsupportedModelError: see ``trace.trace``.
    """
    head = loaded.predictor
    if head is None:
        return None
    assert head.decode_module is not None
    with job.watch.stage("mtp"):
        model, flow = write_beside(job, head, (MTP, MTP_DATA))
    return PredictorRecord(
        file=MTP,
        hidden=HIDDEN,
        inputs=input_records(model.graph.input, head.defaults),
        outputs=tensor_records(model.graph.output),
        states=tuple(state.record() for state in head.decode_module.states),
        token_flow=flow,
    )


def with_predictor_checked(
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    open_head: Callable[[], InferenceSession],
    open_changed: OpenChanged | None,
    seed: int,
) -> Manifest:
    """Compare the head of an artifact that has one, and what it reads, with the original's.

    What is known of hidden states that quantised weights compute is that of the float32 graph.

    Args:
        manifest: of the artifact.
        tested: its model with the original.
        open_head: opens the artifact's.
        open_changed: opens it with its graph changed.
        seed: of the random inputs.
    """
    if manifest.mtp is None:
        return manifest
    loaded = tested.loaded.predictor
    assert loaded is not None
    record = manifest.mtp
    if manifest.quantisation is None:  # else logits are those of other output weights
        hidden = check_hidden(tested, record.hidden, seed)
        record = replace(
            record, hidden_passed=hidden.passed, hidden_error=hidden.max_relative_error
        )
    head = model_under_test(
        *(manifest.predictor(), loaded, open_head), None, None, open_changed=open_changed
    )
    head = replace(head, execution=tested.execution)
    record = replace(
        record,
        placement=placement_of(head),
        parity=parity.check(head, seed).record(),
        streaming=check_streams(head, record.token_flow, seed),
    )
    return replace(manifest, mtp=record)
