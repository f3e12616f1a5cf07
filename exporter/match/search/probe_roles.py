"""Roles of what a stateful region reads, found by what the region computes.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,   o_t = S_t^T q_t

and the other update rules. Every way to give the tensors these roles is computed in float64, by the
op's definition, on the values that the nodes are run on. The proof that follows is that of any
match.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime

from linexport.graph.edit import producer
from linexport.graph.monomials import Size, product
from linexport.graph.run_subgraph import NotRunnableError, session, size_value, symbols_in
from linexport.match.emit.candidate import inputs_of
from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import IDENTITY, Form, Iota, Leaf, PositionOrder, Term
from linexport.match.proof.prove import PROVEN_LENGTHS
from linexport.match.proof.sampling import Draw, falling, fraction, unit
from linexport.match.roles.region_layout import TokenLayout, layout_of
from linexport.match.roles.roles import Roles
from linexport.match.search.stateful_region import Region
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention

EQUAL = 1e-3
"""Largest difference, of the largest output, of a reading from what the nodes compute."""

LOG_OF_NOTHING, SLOWEST = -1e4, 1e-3
"""The logarithm of a rate that keeps nothing, and the lowest rate that is looked for."""

NEWTON, STEP = 3, 1e-6
"""Steps of Newton's method, and the relative change of a rate that gives their slopes."""

MAX_TENSORS_READ = 5
"""Tensors a region may read: query, key, value, decay and beta."""

BATCH = 2


@dataclass(frozen=True)
class Reading:
    """One way to read a region.

    Attributes:
        query, key, value: numbers of leaves.
        decay, beta: the same; None where there is none.
        in_log: the decay is a logarithm already.
        delta: the update rule corrects what it has stored.
        fades: each head decays by a number of its own, which is found as well.
    """

    query: int
    key: int
    value: int
    decay: int | None
    beta: int | None
    in_log: bool
    delta: bool
    fades: bool = False

    @property
    def rule(self) -> str:
        """The update rule of the op."""
        names = ("linear", "delta"), ("gated", "gated_delta")
        return names[self.fades or self.decay is not None][self.delta]

    def draws(self, count: int) -> tuple[Draw, ...]:
        """Return what makes values of each leaf from normal ones."""
        found: list[Draw] = [unit] * count
        if self.decay is not None:
            found[self.decay] = falling if self.in_log else fraction
        if self.beta is not None:
            found[self.beta] = fraction
        return tuple(found)


def readings(vectors: Sequence[int], numbers: Sequence[int]) -> Iterator[Reading]:
    """Yield every way to give each of some leaves a role, one at least."""
    for query, key, value in itertools.product(vectors, repeat=3):
        rest = sorted({*vectors} - {query, key, value})
        for decay, beta in itertools.product((None, *rest, *numbers), (None, *numbers)):
            unused = {*rest, *numbers} - {decay, beta}
            if unused or (decay == beta and decay is not None):
                continue
            for in_log in (True, False) if decay is not None else (True,):
                for delta in (True, False) if beta is None else (True,):
                    for fades in (False, True) if decay is None else (False,):
                        yield Reading(query, key, value, decay, beta, in_log, delta, fades)


def find_roles(
    evaluator: Evaluator,
    region: Region,
    nodes: Sequence[gs.Node],
    imports: Mapping[str, int],
) -> tuple[Roles, Form] | None:
    """Return the roles that give what nodes compute, and the form of their root.

    Args:
        evaluator: of the graph.
        region: to be read.
        nodes: those that compute its root from its leaves.
        imports: operator sets of the model.
    """
    found = [layout_of(evaluator, t, region.tokens) for t in region.leaves]
    found.append(layout_of(evaluator, region.root, region.tokens, region.place))
    layouts = [x for x in found if x is not None]
    if len(region.leaves) > MAX_TENSORS_READ or len(layouts) < len(found):
        return None
    *given, made = layouts
    chunks = {n.inputs[0].name: evaluator.sizes(n.outputs[0]) for n in nodes if n.op == "Reshape"}
    pairs = zip(given, region.leaves, strict=True)
    given = [x.split(chunks.get(t.name) or ()) for x, t in pairs]
    # Heads and batch come before the width of vectors, which numbers lack.
    most = max(len(x.rest) for x in given)
    vectors = [i for i, x in enumerate(given) if len(x.rest) == most]
    numbers = [i for i, x in enumerate(given) if len(x.rest) == most - 1]
    if len(vectors) + len(numbers) < len(given):
        return None
    runs = _Runs(evaluator, region, nodes, imports)
    if layouts[-1].dims[region.place] != region.tokens and runs.cut:
        return None
    for reading in readings(vectors, numbers):
        sizes = _sizes(reading, given, made)
        fitted = None if sizes is None else _fitted(reading, sizes, runs, layouts)
        if sizes is not None and fitted is not None:
            return _roles(reading, sizes, region, [*given, made], fitted)
    return None


@dataclass(frozen=True)
class _Sizes:
    """Batch, heads and widths of a reading."""

    batch: tuple[Size, ...]
    heads: tuple[Size, ...]
    d_k: Size
    d_v: Size
    per_channel: bool

    @property
    def count(self) -> int:
        """The number of heads."""
        return product(list(self.heads)).known or 1


def _sizes(reading: Reading, given: Sequence[TokenLayout], made: TokenLayout) -> _Sizes | None:
    """Return the sizes that all tensors agree on."""
    query, key, value = (given[i].rest for i in (reading.query, reading.key, reading.value))
    if not query or not value:
        return None
    lead, d_k, d_v = query[:-1], query[-1], value[-1]
    batch = tuple(s for s in lead if s.known is None)
    heads = lead[len(batch) :]
    packed = (*batch, product([*heads, d_v]))
    decay = None if reading.decay is None else given[reading.decay].rest
    beta = None if reading.beta is None else given[reading.beta].rest
    known = all(s.known is not None for s in (*heads, d_k, d_v))
    agreed = key == query and value[:-1] == lead and made.rest in (value, packed)
    if not known or not agreed or decay not in (None, lead, query) or beta not in (None, lead):
        return None
    return _Sizes(batch, heads, d_k, d_v, decay == query)


class _Runs:
    """Results of nodes on random values, for the draws of readings."""

    def __init__(
        self,
        evaluator: Evaluator,
        region: Region,
        nodes: Sequence[gs.Node],
        imports: Mapping[str, int],
    ) -> None:
        self.region, self._initial = region, evaluator.initial
        inputs = inputs_of(nodes)
        sizes = [(t, evaluator.sizes(t)) for t in inputs]
        self._inputs = [(t, s) for t, s in sizes if s is not None and t.dtype is not None]
        self._session: onnxruntime.InferenceSession | None = None
        self._known: dict[tuple[Draw, ...], tuple[list[np.ndarray], np.ndarray] | None] = {}
        if len(self._inputs) == len(inputs):
            with contextlib.suppress(NotRunnableError):
                self._session = session(inputs, nodes, region.root, imports)

    def of(self, draws: tuple[Draw, ...]) -> tuple[list[np.ndarray], np.ndarray] | None:
        """Return the leaves and the root, at the first length the nodes take."""
        if draws not in self._known:
            found = (self._at(draws, length) for length in PROVEN_LENGTHS)
            self._known[draws] = next((x for x in found if x is not None), None)
        return self._known[draws]

    @property
    def cut(self) -> bool:
        """Return whether nodes leave out the tokens of a chunk that is not full."""
        units = (unit,) * len(self.region.leaves)
        found = ((length, self._at(units, length)) for length in PROVEN_LENGTHS)
        return any(x is not None and x[1].shape[self.region.place] != n for n, x in found)

    def _at(
        self, draws: tuple[Draw, ...], length: int
    ) -> tuple[list[np.ndarray], np.ndarray] | None:
        if self._session is None:
            return None
        random = np.random.default_rng(0)
        symbols = {n: BATCH for _, shape in self._inputs for s in shape for n in symbols_in(s)}
        symbols |= dict.fromkeys(symbols_in(self.region.tokens), length)
        drawn = dict(zip((t.name for t in self.region.leaves), draws, strict=True))
        fed: dict[str, np.ndarray] = {}
        sized = [(t, [size_value(s, symbols) for s in shape]) for t, shape in self._inputs]
        if any(0 in sizes for _, sizes in sized):
            return None  # no chunk is full: ONNX Runtime crashes in a Scan of none
        for tensor, sizes in sized:
            x = random.standard_normal(sizes)
            made = 0 * x if tensor.name in self._initial else drawn.get(tensor.name, unit)(x)
            fed[tensor.name] = made.astype(np.dtype(tensor.dtype))
        try:
            (result,) = self._session.run(None, fed)
        except Exception:  # a length that the nodes do not take
            return None
        return [fed[t.name] for t in self.region.leaves], result


@dataclass(frozen=True)
class _Numbers:
    """Numbers of a reading that no tensor has: the factor of all outputs, and decays of heads."""

    scale: float
    decays: np.ndarray | None


def _fitted(
    reading: Reading, sizes: _Sizes, runs: _Runs, layouts: Sequence[TokenLayout]
) -> _Numbers | None:
    """Return the numbers with which the reading is right; None where it is not."""
    found = runs.of(reading.draws(len(layouts) - 1))
    if found is None:
        return None
    batch, heads = len(sizes.batch), sizes.count
    values = (*found[0], found[1])
    if any(x.ndim != len(layout.dims) for layout, x in zip(layouts, values, strict=True)):
        return None  # a rank that the graph states wrongly
    *packed, got = (layout.packed(x, batch) for layout, x in zip(layouts, values, strict=True))
    decay = None if reading.decay is None else packed[reading.decay]
    if decay is not None and not reading.in_log:
        decay = np.log(decay)
    q, k, v = (packed[i] for i in (reading.query, reading.key, reading.value))
    beta = None if reading.beta is None else packed[reading.beta]
    if reading.delta and beta is None:
        beta = np.ones((*k.shape[:2], heads))
    spec = LinearAttentionSpec(heads, heads, reading.rule)

    def computed(rates: np.ndarray | None, tokens: int | None = None) -> np.ndarray:
        row = decay if rates is None else np.broadcast_to(rates, (*k.shape[:2], heads))
        g, b = (None if x is None else x[:, :tokens] for x in (row, beta))
        x, y, z = (x[:, :tokens] for x in (q, k, v))
        return linear_attention(spec, x, y, z, decay=g, beta=b)[0]

    width, close = float(sizes.d_k.known or 1), EQUAL * np.abs(got).max()
    # No decay applies to the first token, which alone rules out most readings.
    first = computed(np.zeros(heads) if reading.fades else None, 1)
    for scale in (1.0, width**-0.5, 1 / width):
        if np.abs(got[:, :1] - scale * first).max() > close:
            continue
        rates = _rates(computed, got / scale, heads) if reading.fades else None
        if reading.fades and rates is None:
            continue
        expected = scale * computed(rates)
        if np.abs(got - expected).max() <= close:
            return _Numbers(scale, rates)
    return None


def _rates(computed: Callable[..., np.ndarray], got: np.ndarray, heads: int) -> np.ndarray | None:
    """Return the logarithms of what each head's state fades by from token to token.

    The second output is a + c b, with c the rate. All outputs then say it more precisely, by steps
    of Newton's method; None where it is not a rate.
    """
    if got.shape[1] < 2:
        return None

    def along(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((x * y).reshape(*x.shape[:2], heads, -1).sum((0, 1, 3)))

    none = computed(np.full(heads, LOG_OF_NOTHING), 2)
    change = computed(np.zeros(heads), 2) - none
    with np.errstate(all="ignore"):
        # The c of least squares in got - a = c b, head by head.
        rates = along(got[:, :2] - none, change) / along(change, change)
        for _ in range(NEWTON):
            if not _are_rates(rates):
                return None
            here = computed(np.log(rates))
            # The derivative by log c, as a difference.
            slope = (computed(np.log(rates * (1 + STEP))) - here) / STEP
            rates = rates * (1 + along(got - here, slope) / along(slope, slope))
    return np.log(np.minimum(rates, 1.0)) if _are_rates(rates) else None


def _are_rates(numbers: np.ndarray) -> bool:
    return bool(((numbers > SLOWEST) & (numbers < 1 + EQUAL)).all())


def _roles(
    reading: Reading,
    sizes: _Sizes,
    region: Region,
    layouts: Sequence[TokenLayout],
    fitted: _Numbers,
) -> tuple[Roles, Form]:
    batch, heads = (tuple(Axis(s) for s in group) for group in (sizes.batch, sizes.heads))
    lead: list[Index] = [(a,) for a in (*batch, *heads)]
    t, s, u = (Axis(region.tokens) for _ in range(3))
    d, e = Axis(sizes.d_k), Axis(sizes.d_v)

    def leaf(place: int, time: Axis, *width: Axis) -> Leaf:
        dims = layouts[place].index(time, [*lead, *((a,) for a in width)])
        return Leaf(region.leaves[place], dims)

    decay = None
    if reading.decay is not None:
        rate = leaf(reading.decay, u, *([d] if sizes.per_channel else []))
        rate = rate if reading.in_log else _logarithm(rate)
        decay = Term(1.0, (rate, PositionOrder((t,), (u,))))
    elif fitted.decays is not None:
        numbers = fitted.decays.astype(np.float32).reshape([s.known or 1 for s in sizes.heads])
        stored = gs.Constant(f"{region.root.name}/rates", numbers)
        decay = Term(1.0, (Leaf(stored, tuple((a,) for a in heads)), Iota((t,))))
    roles = Roles(
        query=(leaf(reading.query, t, d),),
        key=(leaf(reading.key, s, d),),
        value=(leaf(reading.value, s, e),),
        weights=(),
        mask=None,
        decay=decay,
        query_position=(t,),
        key_position=(s,),
        channels=(d,),
        widths=(e,),
        batch=batch,
        causal=True,
        scale=fitted.scale,
        delta=reading.delta,
        beta=None if reading.beta is None else leaf(reading.beta, s),
    )
    made = layouts[-1]
    unpacked: list[Index] = [*lead, (e,)]
    packed: list[Index] = [*((a,) for a in batch), (*heads, e)]
    dims = made.index(t, unpacked if len(made.rest) == len(unpacked) else packed)
    return roles, Form(dims, (Term(1.0, (Leaf(region.root, dims),)),))


def _logarithm(rate: Leaf) -> Leaf:
    """Return the logarithm of a rate; of exp(x), x."""
    node = producer(rate.tensor, "Exp")
    if node is not None and isinstance(node.inputs[0], gs.Variable):
        return replace(rate, tensor=node.inputs[0])
    return replace(rate, function=("Log", (), IDENTITY))
