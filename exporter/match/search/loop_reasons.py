"""Linear loops over tokens that no operator has: the part of their step that is in the way.

g' = a g + u            each state by itself, entry by entry: is read
g' = a g + h            two that read each other, h' = b h + g
H' = b H + G            one that reads another, of a full matrix
H' = H A_t + U          a full matrix of each token
y  = g + h              a readout that adds two states
H' = (1 - a b^T) H + u  one that decays by a sum
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.graph.scan_body import reached
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.rules.scan import Steps, read_steps
from linexport.match.forms.step_terms import by_states, states_in
from linexport.match.forms.terms import Form

LINEAR = "is linear in its states, but "

OTHER = (
    "is a linear recurrence, but of no form that the operators have: what keeps their state is "
    "a number for each channel, a turn of pairs of channels, or a delta rule, not a full matrix. "
    "The loop is kept"
)

CASCADE = LINEAR + (
    "one of them reads another that has more numbers than what a token gives and takes, so that a "
    "loop of its own would write all of them for every token. The loop is kept"
)

COUPLED = LINEAR + (
    "two of them read each other. The loop is kept. Such states are fused if they begin with "
    "zeros and every step rotates and scales them as a pair"
)

RATES = LINEAR + (
    "what keeps an entry of one is a sum of products, such as 1 - x y, another number for each "
    "entry of a matrix. Decays of the operators are of each head or key channel. The loop is kept"
)

SUM = LINEAR + (
    "its readout adds two of them. The loop is kept. Where the loop gives each by itself, "
    "in lists of their own for torch.stack, and they are added behind it, both are fused"
)


def linear_loop_reason(e: Evaluator, node: gs.Node) -> str:
    """Return why a Scan, or a Loop, that is linear in its states is not fused."""
    steps = read_steps(e, node) if node.op == "Scan" else None
    if steps is None or not all(_is_entrywise(f, steps) for f in steps.following.values()):
        return OTHER
    read = {name: states_in(form, steps.following) for name, form in steps.following.items()}
    others = [(name, other) for name, own in read.items() for other in own - {name}]
    # A state that reads one by which it is read is in a cycle.
    if any(name in reached(read, other) for name, other in others):
        return COUPLED
    if others:
        return CASCADE
    if any(len(states_in(form, steps.following)) > 1 for form in steps.outputs):
        return SUM
    return RATES if any(map(_has_sum_of_rates, steps.following.items())) else OTHER


def _has_sum_of_rates(state: tuple[str, Form | None]) -> bool:
    """Return whether several terms of a state after a step have it as a factor."""
    name, form = state
    terms = by_states(form, {name})
    return terms is not None and len(terms.kept) + len(terms.moved) > 1


def _is_entrywise(form: Form | None, steps: Steps) -> bool:
    """Return whether entries after a step are of the same entries of states before it."""
    terms = by_states(form, steps.following)
    return terms is not None and not terms.moved
