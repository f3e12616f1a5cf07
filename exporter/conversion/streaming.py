"""Proof that a model streams: by what its nodes do along the tokens, then by running it."""

from __future__ import annotations

import onnx

from linexport import parity
from linexport.conversion.context import TracedOriginal
from linexport.graph.dims import sequence
from linexport.graph.states import State, find_states
from linexport.manifest.proof import StreamingRecord, TokenFlowRecord
from linexport.manifest.records import UNFOLLOWED
from linexport.report import token_flow
from linexport.token_flow import classify, flow_record


def states_of(original: TracedOriginal, model: onnx.ModelProto) -> list[State]:
    """Return the states of a rewritten graph: the model's own, and those that passes gave it."""
    given = [i.name for i in original.traced.graph.graph.input]
    return [*original.traced.states, *find_states(model, given)]


def token_flow_of(original: TracedOriginal, model: onnx.ModelProto) -> TokenFlowRecord | None:
    """Return what the nodes of a rewritten graph do along the tokens.

    None of a model that writes buffers: its calls are what they are, whatever they do with tokens.
    And none of one with an indexer, whose blocks of tokens are complete by numbers that are not
    followed: its layers are the library's, and split sequences are compared with whole ones.
    """
    if any(state.op in UNFOLLOWED for state in original.traced.states):
        return None
    tokens = sequence(original.dims)
    multiple = 1 if tokens is None else original.dims[tokens].multiple
    found = classify(model, states_of(original, model), tokens, multiple)
    return flow_record(found, original.traced.line)


def check_streams(
    tested: parity.ModelUnderTest,
    flow: TokenFlowRecord | None,
    seed: int,
    runs: parity.WholeRuns | None = None,
) -> StreamingRecord:
    """Compare split sequences with whole ones, which are kept, unless a node mixes tokens."""
    return mixing(flow) or parity.check_streaming(tested, seed, runs)


def mixing(flow: TokenFlowRecord | None) -> StreamingRecord | None:
    """Return the record of a model of which a node mixes tokens; None of any other."""
    if flow is None or not flow.mixing:
        return None
    return StreamingRecord(False, token_flow.reason(flow))
