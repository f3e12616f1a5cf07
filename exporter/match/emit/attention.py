"""Roles as nodes: packed inputs, feature maps, the fused node, and its output where it was.

Inputs are brought to (B, T, heads * width) and the output back to the dims it had. Where the graph
came from such a layout, which is usual, no node is needed for either.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper

from linexport.match.emit.concatenated import with_concatenated_features
from linexport.match.emit.cumulative_sum import Sums, is_sum
from linexport.match.emit.decay import Gates
from linexport.match.emit.layout import written_size
from linexport.match.emit.signed_decay import Signs
from linexport.match.emit.tokens import (
    Undelayed,
    delayed_logarithms,
    delayed_tokens,
    masked_tokens,
    over_window,
    reversed_tokens,
    scaled_tokens,
)
from linexport.match.errors import NotAttentionError
from linexport.match.forms import functions
from linexport.match.forms.axes import Index, size_of
from linexport.match.forms.exact import LARGEST
from linexport.match.forms.terms import IDENTITY, Leaf, PositionOrder
from linexport.match.roles import decay
from linexport.match.roles.head_layout import axis_size, check_heads
from linexport.match.roles.roles import Roles
from linexport.match.roles.running_maximum import with_features
from linexport.plugins.ops import linear_attention
from linexport.plugins.ops.linear_attention import INPUTS
from linexport.plugins.ops.op import DOMAIN

UPDATE_RULES = {
    (False, False): "linear",
    (False, True): "gated",
    (True, False): "delta",
    (True, True): "gated_delta",
}
"""Names by whether what is stored is corrected, and whether it fades."""

DECAY = INPUTS.index("decay")

DTYPES = ("float32", "float16", "bfloat16")


class MatchWriter(Sums):
    """Writes the nodes that take the place of a match.

    Attributes:
        undelayed: what is written to the state behind the token that reads it; None where a token
            reads what it has written itself.
    """

    undelayed: Undelayed | None = None

    @property
    def map_proven_to(self) -> float | None:
        """The largest |x| on which the maps were compared; None where there are none."""
        if self.mapped is not None:
            return self.mapped.proven_to
        return LARGEST if any(self.maps.values()) else None

    def write(self) -> gs.Node:
        """Write all nodes and return the fused one.

        Raises:
            NotAttentionError: it cannot be written with the op.
        """
        check_heads(self.roles)
        dtype = self.dtype()
        if is_sum(self.roles):
            return self.sum(dtype)
        rates = self.rates(dtype)
        state_space = self.state_space(dtype, rates)
        if state_space is not None:
            return self._finished(state_space)
        roles, faded = self._decayed(rates, dtype)
        if roles.products:
            roles = with_concatenated_features(self, dtype)
        inputs = self._query_key_value(roles, dtype)
        initial = self._initial(dtype) if roles.initial else None
        if initial is not None:
            inputs[2] = self._since_start(inputs[2], initial, faded, rates)
        mask: gs.Tensor = self._mask(roles.mask) if roles.mask else gs.Variable.empty()
        if roles.reverse:
            # A sum over later tokens is the causal sum of the tokens in reverse order.
            *inputs, mask = (reversed_tokens(self, x) for x in (*inputs, mask))
        if roles.lag:
            inputs, faded, rates, mask = self._earlier(inputs, faded, rates, mask)
        signs = None if rates is None else self.signs(rates)
        if signs is not None:
            inputs = self.turned(inputs, signs)
        inputs += self._optional(roles, faded, mask, dtype)
        if signs is not None:
            for place, past in self.turned_pasts(signs).items():
                inputs[place] = past
        if self.mapped is not None and self.applies_map and self.parameters:
            inputs += [gs.Variable.empty() for _ in range(len(INPUTS) - len(inputs))]
            inputs += self.parameters
        return self._finished(self._attention(inputs, dtype), signs, initial)

    def _decayed(
        self, rates: gs.Tensor | None, dtype: np.dtype[np.generic]
    ) -> tuple[Roles, gs.Tensor]:
        """Return the roles, with features of a running maximum, and the logarithms of decays.

        Args:
            rates: decays that may be negative, see ``rates``.
            dtype: that the op computes in.
        """
        roles, heads = self.roles, self.layout.value
        if roles.stabilized:
            # exp(a_s - m_t) is a product of a feature of the query, one of the key, and decays.
            queries, keys, decays = self.stabilized(heads)
            groups = (roles.batch, roles.key_position, heads)
            roles = with_features(roles, Leaf(self.feature(keys, 0, heads), groups))
            if roles.from_zero:
                groups = (roles.batch, roles.query_position, heads)
                share = Leaf(self.feature(queries, 0, heads), groups)
                self.roles = replace(self.roles, weights=(*self.roles.weights, share))
            return roles, self.cast(self.feature(decays, 0, heads), dtype)
        if rates is not None:
            return roles, self.logarithms_of_sizes(rates)
        return roles, self.decay(dtype) if roles.decay else gs.Variable.empty()

    def _query_key_value(self, roles: Roles, dtype: np.dtype[np.generic]) -> list[gs.Tensor]:
        """Return the packed inputs; one that roles lack is 1 everywhere, of width 1."""
        order = self.layout
        return [
            self.packed(role, leaves, heads, width, dtype)
            if leaves
            else self.everywhere(
                np.ones((1, 1, axis_size((*heads, *width))), dtype), (*heads, *width), time
            )
            for role, leaves, heads, width, time in (
                ("query", roles.query, order.query, roles.channels, roles.query_position),
                ("key", roles.key, order.key, roles.channels, roles.key_position),
                ("value", roles.value, order.value, roles.widths, roles.key_position),
            )
        ]

    def _since_start(
        self, value: gs.Tensor, initial: gs.Tensor, faded: gs.Tensor, rates: gs.Tensor | None
    ) -> gs.Tensor:
        """Return the values of a recurrence that begins with 0 in the place of a given state h.

        b_t - (1 - a_t) h: what is computed is h_t - h, which is zero before the first token.
        """
        decays = self._kept(faded, rates, 1, False)
        kept = scaled_tokens(self, initial, decays, axis_size(self.layout.value))
        stored = self.op.Add(value, kept, shape=initial.shape)
        return self.op.Sub(stored, initial, shape=initial.shape)

    def _optional(
        self, roles: Roles, faded: gs.Tensor, mask: gs.Tensor, dtype: np.dtype[np.generic]
    ) -> list[gs.Tensor]:
        """Return the inputs behind query, key and value, up to the last that is given."""
        beta: gs.Tensor = self._beta(dtype) if roles.delta else gs.Variable.empty()
        # Inputs are positional, and the first two are states: a pass that follows may add them.
        found: list[gs.Tensor] = [gs.Variable.empty(), gs.Variable.empty(), faded, beta, mask]
        while found and found[-1].is_empty():
            found.pop()
        return found

    @property
    def _packed(self) -> tuple[Index, ...]:
        """The dims of the output of the fused node."""
        roles = self.roles
        return (roles.batch, roles.query_position, (*self.layout.output, *roles.widths))

    def _attention(self, inputs: list[gs.Tensor], dtype: np.dtype[np.generic]) -> gs.Node:
        roles, order = self.roles, self.layout
        shape = [written_size(size_of(group)) for group in self._packed]
        output = gs.Variable(self.name("output"), dtype=dtype, shape=shape)
        fused = gs.Node(
            linear_attention.OP.name,
            f"{self.root.name}/LinearAttention",
            {
                "q_num_heads": axis_size(order.query),
                "kv_num_heads": axis_size(order.value),
                "update_rule": UPDATE_RULES[
                    roles.delta, len(inputs) > DECAY and not inputs[DECAY].is_empty()
                ],
                "causal": int(roles.causal),
                "normalize": int(roles.normalize),
                "scale": float(roles.scale),
                "eps": float(roles.eps),
            },
            inputs,
            [output],
            domain=DOMAIN,
        )
        if self.mapped is not None and self.applies_map:
            fused.attrs["feature_map"] = self.mapped.kind
        return fused

    def _finished(
        self, fused: gs.Node, signs: Signs | None = None, initial: gs.Tensor | None = None
    ) -> gs.Node:
        """Write the fused node and the result, and return the node."""
        roles = self.roles
        output: gs.Tensor = fused.outputs[0]
        self.nodes.append(fused)
        if roles.reverse:
            output = reversed_tokens(self, output)
        if signs is not None:
            output = self.turned_back(output, signs)
        if initial is not None:
            output = self.op.Add(output, initial, shape=output.shape)
        output = self.weighted(self.post(output), self._packed)
        for term in roles.bonus_terms:
            output = self.with_bonus(output, term, self._packed)
        self.restore(output)
        return fused

    def _earlier(
        self,
        inputs: list[gs.Tensor],
        faded: gs.Tensor,
        rates: gs.Tensor | None,
        mask: gs.Tensor,
    ) -> tuple[list[gs.Tensor], gs.Tensor, gs.Tensor | None, gs.Tensor]:
        """Return inputs of which each token has the key and the value of k tokens before.

            sum_{s <= t-k} exp(X_{t-m} - X_s) k_s v_s
            = sum_{r <= t} exp(X_{t-m} - X_{r-m}) exp(X_{r-m} - X_{r-k}) k_{r-k} v_{r-k}

        m is 0, or more where keys fade up to a token before the query.

        Raises:
            NotAttentionError: a map is applied to keys, of which those before the first are zero.
        """
        roles, order, lag = self.roles, self.layout, self.roles.lag
        shifted = f"its triangle is shifted by {-lag}"
        if self.mapped is not None:
            raise NotAttentionError(f"{shifted}, and its scores are mapped")
        query, key, value = inputs
        if lag == 1 and rates is None and mask.is_empty():
            self.undelayed = Undelayed(key, value, faded)
        if not mask.is_empty():
            # The op's mask is of its own tokens; delayed keys would meet that of others. Zero keys
            # add 0.
            key = masked_tokens(self, key, mask)
        # An absent key or value is 1 everywhere; zeros in front of the other make the product zero.
        value = delayed_tokens(self, value, lag) if roles.value or not roles.key else value
        key = delayed_tokens(self, key, lag) if roles.key else key
        late = gs.Variable.empty()
        if faded.is_empty():
            return [query, key, value], faded, rates, late
        found = decay.read_decay(roles, order.value)
        since = lag - found.lag - roles.lags  # decays between a key and the query that meets it
        if found.lag:
            rates = None if rates is None else delayed_tokens(self, rates, found.lag)
            faded = delayed_logarithms(self, faded, found.lag)
        if not since:
            return [query, key, value], faded, rates, late
        if roles.key and order.key != order.value:
            raise NotAttentionError(f"{shifted}, and its keys are shared")
        counted = not isinstance(self._decay_source(), PositionOrder)
        kept = self._kept(faded, rates, since, counted)
        if roles.key:
            key = scaled_tokens(self, key, kept, axis_size(order.value))
        else:
            value = scaled_tokens(self, value, kept, axis_size(order.value))
        return [query, key, value], faded, rates, late

    def _kept(
        self, faded: gs.Tensor, rates: gs.Tensor | None, count: int, steady: bool
    ) -> gs.Tensor:
        """Return the products of so many last decays; their logarithms are given, or they are.

        ``steady`` are the same at every token.
        """
        if rates is not None:
            # A negative decay has no logarithm: the product itself is taken.
            return over_window(self, rates, count, "Mul")
        if steady:
            # exp(g)^k = exp(k g)
            return self.op.Exp(self.op.Mul(faded, float(count)))
        # A product of exps is the exp of the sum.
        return self.op.Exp(over_window(self, faded, count, "Add"), shape=faded.shape)

    def _decay_source(self) -> object:
        """Return the factor of the decay that is of positions."""
        assert self.roles.decay is not None
        return next(f for f in self.roles.decay.factors if not isinstance(f, Leaf))

    def dtype(self) -> np.dtype[np.generic]:
        """The widest dtype of what is read.

        The op adds up in float32 whatever it is given: numbers in half precision need no cast to
        float32 where its result is cast back.

        Raises:
            NotAttentionError: the op does not compute in it.
        """
        kinds, roles = [], self.roles
        half = str(self.root.dtype) in DTYPES[1:]
        for leaf in (*roles.query, *roles.key, *roles.value, *roles.weights):
            function = functions.without_casts(leaf.function) if half else leaf.function
            to = functions.casts(function)
            found = leaf.tensor.dtype if to is None else helper.tensor_dtype_to_np_dtype(to)
            if found is None:
                raise NotAttentionError(f"the dtype of {leaf.tensor.name} is not known")
            kinds.append(np.dtype(found))
        # The op computes in one dtype. The widest loses nothing that the graph had.
        widest = max(kinds, key=lambda k: k.itemsize)
        if any(k.name not in DTYPES for k in kinds):
            raise NotAttentionError(f"it computes in {widest}; expected {', '.join(DTYPES)}")
        return widest

    def _initial(self, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """(B, T, heads * width), the same for every token."""
        state, heads = self.roles.initial, (*self.layout.value, *self.roles.widths)
        assert state is not None
        leaves: list[Leaf] = state.of(Leaf)
        if not leaves:
            row = np.full((1, 1, axis_size(heads)), state.coefficient, dtype)
            return self.everywhere(row, heads, self.roles.key_position)
        groups = (self.roles.batch, self.roles.key_position, heads)
        found = self.product_of(leaves, groups, self.layout.value, dtype)
        if state.coefficient == 1.0:
            return found
        return self.op.Mul(found, state.coefficient)

    def _mask(self, leaf: Leaf) -> gs.Tensor:
        """(B, T), True where the key counts."""
        own = leaf.axes - {*self.roles.batch, *self.roles.key_position}
        if own:
            raise NotAttentionError("its mask of keys differs from head to head")
        x = self.grouped(leaf, (self.roles.batch, self.roles.key_position))
        if not leaf.truth or leaf.truth == IDENTITY:
            return x
        return self.function(x, replace(leaf, function=leaf.truth), np.dtype(bool))

    def _beta(self, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """(B, T, heads)."""
        heads, time = self.layout.value, self.roles.key_position
        if self.roles.beta is None:
            return self.everywhere(np.ones((1, 1, axis_size(heads)), dtype), heads, time)
        return self.cast(self.grouped(self.roles.beta, (self.roles.batch, time, heads)), dtype)

    def restore(self, output: gs.Tensor) -> None:
        """Write the result: the packed output in the dims and the dtype of the root."""
        heads = (*self.layout.output, *self.roles.widths)
        groups = (self.roles.batch, self.roles.query_position, heads)
        leaf = Leaf(output, groups)
        result = self.grouped(leaf, self.form.dims)
        dtype = np.dtype(self.root.dtype or output.dtype)
        self.result = self.cast(result, dtype)


class ScaleWriter(Gates):
    """Writes exp(-m_t) of a running maximum m_t."""

    def write(self) -> None:
        """Write all nodes.

        Raises:
            NotAttentionError: see ``stabilized``.
        """
        roles = self.roles
        heads = (*self.layout.value, *roles.widths)
        leaf = Leaf(self.scale(heads), (roles.batch, roles.query_position, heads))
        self.result = self.cast(self.grouped(leaf, self.form.dims), np.dtype(self.root.dtype))
