"""Attention whose running maximum is computed in another way than as one maximum over keys.

    exp(-n_t) sum_s [s <= t] exp(G_t - G_s + i_s) (q_t . k_s) v_s

with n carried by a loop over tokens or chunks, or put together from the maxima of chunks. All but n
is read by the algebra. That n is the running maximum, from zero or from below all exponents, is
shown by values: n is a sum of exponents or the largest of some, so that it grows with them, and
what is equal on exponents of some size is equal on those of any size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import onnx_graphsurgeon as gs

from linexport.graph.edit import detach
from linexport.graph.findings import Findings
from linexport.manifest.matches import ProofRecord
from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.candidate import rewrite_candidate
from linexport.match.emit.operands import Factors
from linexport.match.emit.stabilized import StabilizedWriter
from linexport.match.errors import NotAttentionError
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.step_values import StepNames
from linexport.match.forms.terms import IDENTITY, Form, Leaf, Nested, StepValue, Term
from linexport.match.forms.unify import without_inverses
from linexport.match.proof.prove import ProofFailedError, RewriteCandidate, prove
from linexport.match.roles.homogeneity import Homogeneous
from linexport.match.roles.read import read_roles
from linexport.match.roles.roles import Roles
from linexport.match.roles.running_maximum import exponent_of
from linexport.match.roles.subgraph import Root
from linexport.match.search.rewriter import Rewriter

log = logging.getLogger(__name__)

MAXIMA = ("Max", "ReduceMax")


@dataclass(frozen=True)
class _Found:
    """An attention times exp(-n_t).

    Attributes:
        form: without that.
        maximum: n.
    """

    form: Form
    roles: Roles
    maximum: Leaf


def replace_stabilized(graph: gs.Graph, withdrawn: Mapping[str, str]) -> Findings:
    """Replace attention that is stabilised by a maximum of its own.

    Args:
        graph: changed in place.
        withdrawn: matches to leave as they are, by the value they compute, with the reason.
    """
    if not _has_maxima(graph):
        return Findings()
    search = _Search(graph, Evaluator(graph, names=StepNames()))
    for tensor in [o for node in reversed(graph.nodes) for o in node.outputs]:
        if tensor.name not in search.covered and not tensor.is_empty():
            search.replace(tensor, withdrawn.get(tensor.name))
    search.free_lengths()
    return Findings(tuple(search.matches), (), tuple(search.rejected))


def _has_maxima(graph: gs.Graph) -> bool:
    inside = (a for node in graph.nodes for a in node.attrs.values() if isinstance(a, gs.Graph))
    return any(node.op in MAXIMA for node in graph.nodes) or any(map(_has_maxima, inside))


class _Search(Rewriter):
    """Finds and replaces in one graph."""

    def replace(self, tensor: gs.Variable, withdrawn: str | None) -> None:
        """Replace a value, where it is such an attention."""
        found = self._read(tensor)
        if found is None or self._cancels(tensor, found.maximum):
            return
        roles, maximum = found.roles, found.maximum
        divisors = tuple(f for f in roles.weights if self._depends(f.tensor, maximum))
        kept = tuple(f for f in roles.weights if f not in divisors)
        roles = replace(roles, weights=kept)
        region = self.region(tensor, roles.leaves)
        if not self._is_maximum(roles, maximum):
            log.debug("%s is left as it is: its maximum is of something else", tensor.name)
            return
        for from_zero in (True, False):
            own = replace(roles, from_zero=from_zero)
            root = Root(tensor, found.form, own, region)
            if withdrawn is not None:
                self.reject_match(root, withdrawn)
                return
            writer = StabilizedWriter(
                tensor,
                found.form,
                own,
                divisors,
                lambda t: self._scaled_by(t) == maximum.tensor.name,
                partial(self._sum, like=own, maximum=maximum),
            )
            problem = self.fuse(root, writer)
            if problem is None:
                return
            log.debug("%s is left as it is: %s", tensor.name, problem)
        self.covered |= {t.name for n in region for t in n.outputs}

    def swap(self, root: Root, writer: Factors) -> tuple[RewriteCandidate, ProofRecord]:
        """Have the root computed by nodes that were written, if sums have the same maximum.

        A quotient is the same whatever maximum is subtracted, but for an epsilon: sums are not.

        Raises:
            ProofFailedError: they compute something else.
        """
        assert isinstance(writer, StabilizedWriter)
        if writer.divides and not writer.sums:
            raise ProofFailedError("it is divided by no sum with the same maximum")
        for found in writer.sums:
            self._prove(found)
        return super().swap(root, writer)

    def _prove(self, found: Root) -> None:
        writer = MatchWriter(found.tensor, found.form, found.roles)
        region = self.region(found.tensor, found.roles.leaves)
        try:
            writer.write()
            whole = replace(found, region=region)
            prove(rewrite_candidate(self.evaluator, self.imports, whole, writer))
        finally:
            detach(writer.nodes)

    def _read(self, tensor: gs.Tensor) -> _Found | None:
        """Return an attention times exp of a negative number of each query."""
        form = self.evaluator.form(tensor)
        if form is None or len(form.terms) != 1:
            return None
        term = without_inverses(form.terms[0])
        scales = [(f, n) for f in term.of(Nested) if (n := _subtracted(f, form)) is not None]
        if len(scales) != 1:
            return None
        ((scale, maximum),) = scales
        left = Term(term.coefficient, tuple(f for f in term.factors if f is not scale))
        # The factors that are left must be of tokens: a value of a loop's step has no form outside
        # of it.
        if any(isinstance(leaf, StepValue) for leaf in _leaves(left)):
            return None
        form = Form(form.dims, (left,))
        try:
            roles = read_roles(form, self.evaluator.is_weight)
            if roles is None or roles.normalize or not maximum.axes & {*roles.query_position}:
                return None
            roles = replace(roles, stabilized=True)
            exponent_of(roles)
        except NotAttentionError:
            return None
        return _Found(form, roles, maximum)

    def _cancels(self, tensor: gs.Tensor, maximum: Leaf) -> bool:
        """Return whether a quotient is the same without the maximum, see ``quotients``."""
        quotients = (node for node in tensor.outputs if node.op == "Div")
        others = (self._read(t) for node in quotients for t in node.inputs if t is not tensor)
        return any(o is not None and o.maximum.tensor.name == maximum.tensor.name for o in others)

    def _sum(self, tensor: gs.Tensor, like: Roles, maximum: Leaf) -> tuple[Form, Roles] | None:
        """Return the form and the roles of a sum over keys with the same maximum."""
        found = self._read(tensor)
        if found is None or found.roles.widths or found.roles.weights:
            return None
        if found.maximum.tensor.name != maximum.tensor.name:
            return None
        return found.form, replace(found.roles, from_zero=like.from_zero)

    def _scaled_by(self, tensor: gs.Tensor) -> str | None:
        """Return the name of n where a tensor is exp(-n)."""
        form = self.evaluator.form(tensor)
        if form is None or len(form.terms) != 1 or len(form.terms[0].factors) != 1:
            return None
        (term,) = form.terms
        (factor,) = term.factors
        if isinstance(factor, Nested):
            found = _subtracted(factor, form) if term.coefficient == 1 else None
            return None if found is None else found.tensor.name
        if not isinstance(factor, Leaf) or term.coefficient != 1:
            return None
        match factor.function:
            case ("Exp", (), ("Neg", (), ("x",)) | ("Mul", (), ("x",), ("const", -1.0, _))):
                return factor.tensor.name
        return None

    def _depends(self, tensor: gs.Tensor, maximum: Leaf) -> bool:
        """Return whether a value is computed of the attention's maximum."""
        pending, seen = [tensor], set[str]()
        while pending:
            found = pending.pop()
            if found.name in seen:
                continue
            seen.add(found.name)
            if self._scaled_by(found) == maximum.tensor.name:
                return True
            node = found.inputs[0] if found.inputs else None
            if node is not None and node.op != "Scan":
                pending += node.inputs
        return False

    def _is_maximum(self, roles: Roles, maximum: Leaf) -> bool:
        """Return whether n grows with the exponents that it is a maximum of."""
        own = exponent_of(roles)
        # A multiple c i is homogeneous where i is.
        function = own.function[2]
        if function[0] == "Mul" and function[3][0] == "const":
            function = function[2]
        exponents = [replace(own, function=function)]
        exponents += roles.decay.of(Leaf) if roles.decay is not None else []
        return Homogeneous(self.graph, self.evaluator, exponents).grows(maximum.tensor)


def _subtracted(factor: Nested, form: Form) -> Leaf | None:
    """Return n, a number of each query, of exp(-n)."""
    if factor.kind != "exp" or len(factor.inner.terms) != 1 or not factor.axes <= form.axes:
        return None
    (term,) = factor.inner.terms
    leaf = term.factors[0] if len(term.factors) == 1 else None
    if not isinstance(leaf, Leaf) or leaf.function != IDENTITY or leaf.axes != factor.axes:
        return None
    return leaf if term.coefficient == -1 else None


def _leaves(term: Term) -> Iterator[Leaf]:
    for factor in term.factors:
        if isinstance(factor, Leaf):
            yield factor
        elif isinstance(factor, Nested):
            for inner in factor.inner.terms:
                yield from _leaves(inner)
