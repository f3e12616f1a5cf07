"""Classification of a graph's nodes by what they do along the tokens, and whether it streams."""

from linexport.token_flow.classify import NOTHING, Classification, FlowNode, classify
from linexport.token_flow.interpreter import FlowKind
from linexport.token_flow.record import flow_record

__all__ = ["NOTHING", "Classification", "FlowKind", "FlowNode", "classify", "flow_record"]
