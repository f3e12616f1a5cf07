"""Linear attention in a graph: read from normal forms, proven, and put in place.

Every value whose form is an attention is a root. Of several on one path the last is taken, with all
its reshapes and its normaliser, unless something else reads one on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.graph.edit import detach, nodes_behind, producer
from linexport.graph.findings import Findings, UnmatchedCandidate
from linexport.graph.operators import CONTRACTIONS, RESHAPES
from linexport.graph.run_subgraph import symbols_in
from linexport.match.emit.attention import MatchWriter, ScaleWriter
from linexport.match.errors import NotAttentionError
from linexport.match.forms import rules
from linexport.match.forms.axes import size_of
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Form, Leaf
from linexport.match.forms.token_sizes import of_positions
from linexport.match.proof.prove import ProofFailedError
from linexport.match.roles import feature_maps, polynomial, softmax
from linexport.match.roles.bonus_term import split_bonus
from linexport.match.roles.factorise import with_factors
from linexport.match.roles.read import read_roles
from linexport.match.roles.roles import Roles
from linexport.match.roles.running_maximum import weights_below
from linexport.match.roles.subgraph import Root
from linexport.match.search.rewriter import Rewriter
from linexport.match.search.speculate_if import why_kept

log = logging.getLogger(__name__)

rules.load()

SUMS = CONTRACTIONS | {"CumSum", "Scan"}
"""Operators that sum over tokens."""

ADDS_OWN = CONTRACTIONS | {"ReduceSum", "Scan"}
"""Ops that may compute attention plus a per-token term in a single node.
"""


STEPS_NOT_CONSTANT = "is kept where the number of its steps is not a constant up to 128"


def _why_left(node: gs.Node) -> str:
    """Return why the body of a node is not inlined."""
    if node.op != "If":
        return STEPS_NOT_CONSTANT
    kept = why_kept(node)
    return f"is kept: {kept}; torch.where of both is fused" if kept else "is kept"


class Search(Rewriter):
    """Finds and replaces in one graph.

    Args:
        graph: changed in place.
        withdrawn: matches to leave as they are, by the name of the value they compute, with the
            reason.
        initial: given states before the first token, see ``initial_states``.
    """

    def __init__(
        self,
        graph: gs.Graph,
        withdrawn: Mapping[str, str] | None = None,
        initial: Collection[str] = (),
    ) -> None:
        super().__init__(graph, Evaluator(graph, initial=initial))
        self.withdrawn = dict(withdrawn or {})
        self.unmatched: dict[str, UnmatchedCandidate] = {}
        self.stabilized = False
        self.positions = of_positions(graph)

    def run(self) -> Findings:
        """Replace all that can be proven."""
        roots = self._ended(self._roots())
        # From the end: a normalised attention contains its numerator, which is a root as well. What
        # a larger match covers is not looked at again.
        for root in reversed(list(roots.values())):
            if root.tensor.name in self.covered or self._split(root, roots):
                continue
            reason = self.withdrawn.get(root.tensor.name)
            if reason is None:
                self._replace(root)
            else:
                self.reject_match(root, reason)
        if self.stabilized:
            self._replace_scales()
        self._replace_needed(roots)
        self.free_lengths()
        unmatched = [n for name, n in self.unmatched.items() if name not in self.covered]
        unmatched = [n for n in unmatched if not self._is_moved(n.where)]
        unmatched = [n for n in self._last(unmatched) if not self._is_quotient(n.where)]
        unmatched += self._inside(self.graph, self.evaluator)
        order = {n.outputs[0].name: i for i, n in enumerate(self.graph.nodes) if n.outputs}
        self.matches.sort(key=lambda m: order.get(m.where, 0))
        return Findings(tuple(self.matches), tuple(unmatched), tuple(self.rejected))

    def _replace_needed(self, roots: Mapping[str, Root]) -> None:
        """Replace what is inside of a match and read outside of it, such as a denominator."""
        tried = self.left | {found.where for found in self.matches}
        for name, root in roots.items():
            if name not in self.covered or name in tried:
                continue
            live = {id(node) for node in nodes_behind(self.graph.outputs)}
            inside = {id(node) for node in root.region}
            if inside & live and any(id(node) in live for node in root.tensor.outputs):
                self._replace(root)

    def _inside(self, graph: gs.Graph, evaluator: Evaluator) -> list[UnmatchedCandidate]:
        """Attention in the bodies of If, Loop and Scan."""
        found: list[UnmatchedCandidate] = []
        for node in graph.nodes:
            if any(o.name in self.covered for o in node.outputs):
                continue
            for body in (a for a in node.attrs.values() if isinstance(a, gs.Graph)):
                inner = Evaluator(body, outer=evaluator)
                roots = attention_in(body, inner)
                if roots:
                    reason = (
                        f"it is in a body of {node.op} {node.name}, which "
                        f"{_why_left(node)}. Ops of linexport are put into the main graph only"
                    )
                    found.append(UnmatchedCandidate(roots[-1], (node.name,), reason))
                found += self._inside(body, inner)
        return found

    def _ended(self, roots: dict[str, Root]) -> dict[str, Root]:
        """Return more roots, where one attention reads another and both are no single one.

        Its reader is then found only if it sees the other as a tensor of the graph.
        """
        tried = set[str]()
        while name := next((n for n in roots if n not in tried and self._is_read(roots, n)), None):
            tried.add(name)
            before, refused = self.evaluator, self.unmatched
            ends = {*before.ends, name}
            self.evaluator = Evaluator(self.graph, ends=ends, initial=before.initial)
            self.unmatched = {}
            found = self._roots()
            if any(name in (f.tensor.name for f in r.roles.leaves) for r in found.values()):
                roots = found
            else:
                self.evaluator, self.unmatched = before, refused
        return roots

    def _is_read(self, roots: Mapping[str, Root], name: str) -> bool:
        """Return whether tokens of an attention are summed again, to something that is none."""

        def read(tensor: gs.Tensor) -> bool:
            for node in tensor.outputs:
                others = [t for t in node.inputs if t is not tensor]
                sums = node.op in SUMS and not any(map(self.evaluator.is_weight, others))
                if sums and not any(o.name in roots for o in node.outputs):
                    return True
                if node.op in RESHAPES | {"Add", "Mul"} and any(map(read, node.outputs)):
                    return True
            return False

        return read(roots[name].tensor)

    def _roots(self) -> dict[str, Root]:
        roots: dict[str, Root] = {}
        for node in self.graph.nodes:
            for tensor in node.outputs:
                form = None if tensor.is_empty() else self.evaluator.form(tensor)
                form = self.evaluator.inside.get(tensor.name, form)
                if form is None:
                    continue
                mapped = None
                form, bonus = split_bonus(form) if node.op in ADDS_OWN else (form, ())
                form = with_factors(self.evaluator, form)
                try:
                    found = polynomial.read_polynomial(form, self.evaluator.is_weight)
                    if found is not None and found[1].cancels:
                        _check_quotient(tensor, *found)
                    form = form if found else self._readable(node, form)
                    roles, mapped = found or (read_roles(form, self.evaluator.is_weight), None)
                except NotAttentionError as error:
                    softened = softmax.exponent_reason(self.evaluator, form)
                    self._reject(node, softened or str(error))
                    continue
                if roles is None and (
                    reason := softmax.not_linear_reason(self.evaluator, node, form)
                ):
                    self._reject(node, reason)
                if roles is not None and not self._is_left(tensor, roles):
                    roles = replace(roles, bonus_terms=bonus)
                    region = self.region(tensor, roles.leaves)
                    roots[tensor.name] = Root(tensor, form, roles, region, mapped)
        return roots

    def _is_left(self, tensor: gs.Tensor, roles: Roles) -> bool:
        """Return whether something else computes a value that is an attention."""
        counted = all(leaf.tensor.name in self.positions for leaf in roles.leaves)
        return counted or _overflows(tensor, roles) or _is_late(tensor.inputs[0], roles)

    def _readable(self, node: gs.Node, form: Form) -> Form:
        """Return a form that has roles, be it that of a cumulative sum of a tensor.

        What is summed may be made of other sums, such as a quotient of each token.
        """
        if node.op != "CumSum" or _has_roles(form, self.evaluator):
            return form
        return self.evaluator.form_of_input(node) or form

    def _reject(self, node: gs.Node, reason: str) -> None:
        where = node.outputs[0].name
        self.unmatched[where] = UnmatchedCandidate(where, (node.name,), reason)

    def _last(self, unmatched: Sequence[UnmatchedCandidate]) -> list[UnmatchedCandidate]:
        """One for each path: where several values fail for one reason, the last."""
        tensors = {t.name: t for n in self.graph.nodes for t in n.outputs}
        reasons = {n.where: n.reason for n in unmatched}

        def repeated(candidate: UnmatchedCandidate) -> bool:
            tensor = tensors.get(candidate.where)
            consumers = tensor.outputs if tensor is not None else []
            return any(
                reasons.get(o.name) == candidate.reason for r in consumers for o in r.outputs
            )

        return [n for n in unmatched if not repeated(n)]

    def _is_moved(self, where: str) -> bool:
        """Return whether a value is a reshaped or transposed match: tokens as rows and columns."""
        fused = {m.where for m in self.matches}
        tensor: gs.Tensor = next(t for n in self.graph.nodes for t in n.outputs if t.name == where)
        while tensor.name not in fused:
            node = producer(tensor)
            if node is None or node.op not in RESHAPES:
                return False
            tensor = node.inputs[0]
        return True

    def _is_quotient(self, where: str) -> bool:
        """Return whether a value is a quotient of which both sums are fused, each by itself."""
        fused = {m.where for m in self.matches}
        tensors = {t.name: t for n in self.graph.nodes for t in n.outputs}
        pending, divided, found = [tensors[where]], False, set[str]()
        while pending:
            tensor = pending.pop()
            if tensor.name in fused:
                found.add(tensor.name)
                continue
            for node in tensor.inputs:
                if node.op not in RESHAPES | {"Add", "Mul", "Div"}:
                    if self._adds_tokens(tensor):
                        return False
                    continue
                divided |= node.op == "Div"
                moved = node.inputs[:1] if node.op in RESHAPES else node.inputs
                pending += [t for t in moved if isinstance(t, gs.Variable)]
        return divided and len(found) == 2

    def _adds_tokens(self, tensor: gs.Tensor) -> bool:
        """Return whether a value may be more than something of its token, as a weight of it is."""
        weight = self.evaluator.is_weight
        return any(
            node.op in SUMS and not any(map(weight, node.inputs)) for node in nodes_behind([tensor])
        )

    def _split(self, root: Root, roots: dict[str, Root]) -> bool:
        """Return whether an attention on the way must be fused by itself instead.

        Something outside reads it as well, or it is this attention before its weights.
        """
        inside, siblings = {id(n) for n in root.region}, root.tensor.inputs[0].outputs
        for node in root.region:
            for tensor in node.outputs:
                # Other outputs of the same loop are not on the way.
                if tensor.name not in roots or any(tensor is o for o in siblings):
                    continue
                inner = roots[tensor.name].roles
                if root.roles.query and not inner.query:
                    # A sum over keys alone, of which the attention is made. Where it is added once
                    # more, as it was some tokens before, it has to be there.
                    added = [f.tensor for t in root.roles.bonus_terms for f in t.of(Leaf)]
                    if any(node is n for n in nodes_behind(added)):
                        return True
                    continue
                # Factors that differ from query to query are outside the sum over keys: without
                # them the inner value is the whole attention, and a simpler one. What lacks more
                # than them is a part, such as the logarithms of products of decays.
                if (
                    root.roles.weights
                    and inner.value
                    and not inner.weights
                    and _is_whole(inner, root.roles)
                ):
                    return True
                read_outside = any(
                    id(r) not in inside and not self._is_last(r, root) for r in tensor.outputs
                )
                # What something outside reads has to be computed anyway, so it is fused by itself.
                # Not the numerator of a quotient, though: the whole quotient is worth more.
                whole = inner.normalize == root.roles.normalize
                if whole and (read_outside or id(tensor) in self.outputs):
                    return True
        return False

    def _is_last(self, node: gs.Node, root: Root) -> bool:
        """Return whether a node takes a value without tokens, such as the state of the last chunk.

        A state of the whole attention may be that value; see ``final_states``. Where it is none,
        what the node reads is fused by itself after all.
        """
        tokens = symbols_in(size_of(root.roles.query_position))
        every = [self.evaluator.sizes(t) for t in node.outputs]
        return bool(tokens) and all(
            sizes is not None and not any(symbols_in(s) & tokens for s in sizes) for sizes in every
        )

    def _replace(self, root: Root) -> None:
        # Before the first token the model has no key, and a map makes a key of zeros. Features of
        # several products are not those of one map.
        own = root.mapped is not None or root.roles.lag > 0 or bool(root.roles.products)
        mapped = None if own else feature_maps.read_map(self.evaluator, root.roles, self.imports)
        # With its feature map the match replaces more nodes. Where that cannot be proven, the match
        # without it still may be.
        if mapped is not None:
            roles, in_front = mapped
            wider = replace(root, roles=roles, region=self.region(root.tensor, roles.leaves))
            if self.fuse(wider, MatchWriter(root.tensor, root.form, roles, in_front)) is None:
                return
        writer = MatchWriter(root.tensor, root.form, root.roles, root.mapped)
        problem = self.fuse(root, writer)
        if problem is None:
            self.stabilized |= root.roles.stabilized
        elif isinstance(problem, NotAttentionError):
            self._reject(root.tensor.inputs[0], str(problem))
        else:
            self.reject_match(root, str(problem))

    def _replace_scales(self) -> None:
        """Replace exp(-m), in which the maximum of a stable form is read once more."""
        for tensor in [o for n in self.graph.nodes for o in n.outputs]:
            form = None if tensor.is_empty() else self.evaluator.form(tensor)
            below = None if form is None else weights_below(form)
            if form is None or below is None or tensor.name in self.covered:
                continue
            try:
                roles = read_roles(below, self.evaluator.is_weight)
                if roles is not None:
                    self._replace_scale(
                        Root(tensor, form, roles, self.region(tensor, roles.leaves))
                    )
            except (NotAttentionError, ProofFailedError) as reason:
                log.debug("%s is left as it is: %s", tensor.name, reason)

    def _replace_scale(self, root: Root) -> None:
        writer = ScaleWriter(root.tensor, root.form, root.roles)
        try:
            writer.write()
            self.swap(root, writer)
        except (NotAttentionError, ProofFailedError):
            detach(writer.nodes)
            raise


def attention_in(graph: gs.Graph, evaluator: Evaluator) -> list[str]:
    """Return the names of a graph's values that are linear attention."""
    return [o.name for n in graph.nodes for o in n.outputs if _reads(evaluator, o)]


def _is_whole(inner: Roles, roles: Roles) -> bool:
    """Return whether an attention is another one without its weights."""
    if inner.normalize is not roles.normalize:
        return False
    weights = {id(f) for f in roles.weights}
    needed = {f.tensor.name for f in roles.leaves if id(f) not in weights}
    return needed <= {f.tensor.name for f in inner.leaves}


def _overflows(tensor: gs.Tensor, roles: Roles) -> bool:
    """Return whether a sum of exps is taken the logarithm of, which a pass computes stably."""
    exps = not roles.query and any(map(_is_exp, roles.value))
    return exps and any(node.op == "Log" for node in tensor.outputs)


def _is_late(node: gs.Node, roles: Roles) -> bool:
    """Return whether a node delays sums over keys alone: they are there, and have a state."""
    return roles.lag > 1 and not roles.query and node.op in ("Pad", "Slice", "Concat")


def _is_exp(leaf: Leaf) -> bool:
    return leaf.function[0] == "Exp" or producer(leaf.tensor, "Exp") is not None


def _check_quotient(tensor: gs.Tensor, roles: Roles, mapped: feature_maps.Mapped) -> None:
    """Refuse a quotient of sums that may be small although their terms are large.

    Raises:
        NotAttentionError: it is one, or part of one.
    """
    if roles.normalize or not roles.value or _divided(tensor):
        raise NotAttentionError(
            f"its scores x become {mapped.cancels}, which may be negative, before their sum is "
            "divided by: computed from features, that would be a small sum of large terms. What is "
            "never negative is fused, such as an even power, or any where queries and keys are not "
            "(relu, exp)"
        )


def _divided(tensor: gs.Tensor) -> bool:
    """Return whether a tensor or the same values in another shape are divided."""
    return any(
        node.op == "Div" or (node.op in RESHAPES and any(map(_divided, node.outputs)))
        for node in tensor.outputs
    )


def _reads(evaluator: Evaluator, tensor: gs.Tensor) -> bool:
    form = None if tensor.is_empty() else evaluator.form(tensor)
    return form is not None and _has_roles(form, evaluator)


def _has_roles(form: Form, evaluator: Evaluator) -> bool:
    try:
        return read_roles(form, evaluator.is_weight) is not None
    except NotAttentionError:
        return False
