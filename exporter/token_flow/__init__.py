"""What each node of a graph does along the tokens: alone, by a state, or mixing them."""

from linexport.token_flow.classify import NOTHING, Classification, Placed, classify
from linexport.token_flow.interpreter import Kind

__all__ = ["NOTHING", "Classification", "Kind", "Placed", "classify"]
