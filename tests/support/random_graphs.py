"""Random ONNX graphs that hold linear attention, or almost: for counting what is found.

A graph is a way to write attention, drawn part by part (how positions are masked, in which order
products are taken, where the normaliser is), with random legal detours at every value: transposes
and reshapes there and back, casts, scalings that cancel, branches that something else reads. Half
of the graphs are spoiled in one place, so that they are no linear attention any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, shape_inference

from linexport import passes
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.registry import attach_functions

HEADS, D_K, D_V = 2, 4, 6
OPSET = 20

ROUNDING = 5e-5
"""Between a graph and its rewrite, relative to the largest value."""

SPOILED = (
    "softmax",
    "exp of scores",
    "relu of scores",
    "root of scores",
    "other map below",
    "other keys below",
    "shifted triangle",
    "window",
    "random mask",
    "bias below scores",
    "denominator squared",
)
"""Ways not to be linear attention."""

FAITHFUL = {"other map below", "other keys below", "denominator squared"}
"""Spoiled in the denominator: the numerator alone is linear attention, and may be fused."""

DELAYED = {"shifted triangle"}
"""Linear attention all the same, over keys and values of earlier tokens: it may be fused."""


@dataclass(frozen=True)
class RandomGraph:
    """A model of inputs q, k, v; ``spoiled`` says how it is not linear attention, if so."""

    model: onnx.ModelProto
    causal: bool
    normalised: bool
    spoiled: str | None
    recipe: tuple[str, ...]


class Generator:
    """Draws one graph."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.b = Body()
        self.recipe: list[str] = []
        self.branches: list[str] = []

    def draw(self) -> RandomGraph:
        """The graph of this seed."""
        causal = self.chance(0.6)
        normalised = self.chance(0.7)
        spoiled = str(self.random.choice(SPOILED)) if self.chance(0.5) else None
        if spoiled in ("shifted triangle", "window"):
            causal = True
        if spoiled in FAITHFUL:
            normalised = True
        quadratic = spoiled is not None and spoiled not in FAITHFUL
        quadratic = quadratic or (self.chance(0.5) if causal else self.chance(0.3))
        layouts = {name: self.pick("BTHD", "BHTD", "packed", "TBHD") for name in "qkv"}
        q, k, v = (self.unpack(n, layout) for n, layout in layouts.items())
        kind = self.pick("elu", "relu", "exp", "softplus", "sigmoid")
        below = self.pick(*[m for m in ("relu", "exp", "sigmoid") if m != kind])
        q, k_below = self.map(q, kind), self.map(k, below)
        k = self.map(k, kind)
        if self.chance(0.3):
            q = self.b.Mul(q, self.b.const(0.5))
            self.recipe.append("scale")
        if spoiled == "other keys below":
            k_below = self.b.Mul(k, self.b.Sigmoid(v_like(self.b, k)))
        if spoiled not in ("other map below", "other keys below"):
            k_below = k
        write = self.quadratic if quadratic else self.linear
        out = write(q, k, k_below, self.detour(v), causal, normalised, spoiled)
        out = self.detour(out)
        out = self.b.Transpose(out, perm=[0, 2, 1, 3])
        if self.chance(0.7):
            out = self.b.Reshape(out, self.b.const([0, 0, HEADS * D_V]))
        return RandomGraph(
            self.model(layouts, out), causal, normalised, spoiled, tuple(self.recipe)
        )

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def pick(self, *choices: str) -> str:
        chosen = str(self.random.choice(choices))
        self.recipe.append(chosen)
        return chosen

    def unpack(self, name: str, layout: str) -> str:
        """(B, H, T, d)."""
        width = D_V if name == "v" else D_K
        if layout == "packed":
            split = self.b.Reshape(name, self.b.const([0, 0, HEADS, width]))
            return self.detour(self.b.Transpose(split, perm=[0, 2, 1, 3]))
        perm = {"BTHD": [0, 2, 1, 3], "BHTD": [0, 1, 2, 3], "TBHD": [1, 2, 0, 3]}[layout]
        return self.detour(self.b.Transpose(name, perm=perm))

    def map(self, x: str, kind: str) -> str:
        b = self.b
        match kind:
            case "elu":
                choice = self.pick("elu+1", "where", "relu+exp")
                if choice == "elu+1":
                    y = b.Add(b.Elu(x), b.const(1.0))
                elif choice == "where":
                    y = b.Where(b.Greater(x, b.const(0.0)), b.Add(x, b.const(1.0)), b.Exp(x))
                else:
                    y = b.Add(b.Relu(x), b.Exp(b.Min(x, b.const(0.0))))
            case "relu":
                y = b.Relu(x) if self.chance(0.5) else b.Max(x, b.const(0.0))
            case "exp":
                y = b.Exp(x)
            case "softplus":
                y = b.Softplus(x)
            case _:
                y = b.Sigmoid(x)
        return self.detour(y)

    def detour(self, x: str, rank: int = 4) -> str:
        """The same value after some operators that change nothing."""
        b = self.b
        for _ in range(int(self.random.integers(0, 3))):
            match self.pick("transpose", "reshape", "cast", "scale", "identity", "branch", "none"):
                case "transpose":
                    perm = [int(p) for p in self.random.permutation(rank)]
                    back = [int(p) for p in np.argsort(perm)]
                    x = b.Transpose(b.Transpose(x, perm=perm), perm=back)
                case "reshape" if rank == 4:
                    shape = b.Shape(x)
                    flat = b.Reshape(x, b.const([0, 0, -1]))
                    x = b.Reshape(flat, shape)
                case "cast":
                    wide = b.Cast(x, to=TensorProto.DOUBLE)
                    x = b.Cast(wide, to=TensorProto.FLOAT)
                case "scale":
                    x = b.Div(b.Mul(x, b.const(4.0)), b.const(4.0))
                case "identity":
                    x = b.Squeeze(b.Unsqueeze(b.Identity(x), b.const([1])), b.const([1]))
                case "branch":
                    self.branches.append(b.ReduceMax(b.Tanh(x), keepdims=0))
        return x

    def triangle(self, q: str, spoiled: str | None) -> str:
        """(T, T), true where a key counts."""
        b = self.b
        length = b.Shape(q, start=2, end=3)
        offset = -2 if spoiled == "shifted triangle" else 0
        if self.pick("positions", "trilu") == "trilu":
            ones = b.Expand(b.const(1.0), b.Concat(length, length, axis=0))
            return b.Cast(b.Trilu(ones, b.const(offset), upper=0), to=TensorProto.BOOL)
        count = b.Squeeze(length)
        t = b.Range(b.const(0), count, b.const(1))
        row, column = b.Unsqueeze(t, b.const([1])), b.Unsqueeze(t, b.const([0]))
        if offset:
            return b.Greater(b.Sub(row, b.const(1)), column)
        if self.chance(0.5):
            return b.Not(b.Less(row, column))
        return b.GreaterOrEqual(b.Sub(row, column), b.const(0))

    def masked(self, scores: str, q: str, spoiled: str | None) -> str:
        b = self.b
        if spoiled is None and self.pick("direct", "mask") == "direct":
            return b.Trilu(scores, upper=0)
        mask = self.triangle(q, spoiled)
        if self.chance(0.5):
            scores = b.Where(mask, scores, b.const(0.0))
        else:
            scores = b.Mul(scores, b.Cast(mask, to=TensorProto.FLOAT))
        return b.Trilu(scores, b.const(-2), upper=1) if spoiled == "window" else scores

    def quadratic(
        self,
        q: str,
        k: str,
        k_below: str,
        v: str,
        causal: bool,
        normalised: bool,
        spoiled: str | None,
    ) -> str:
        """All pairs, then the values."""
        b = self.b

        def scores_of(keys: str) -> str:
            match self.pick("matmul", "einsum", "products"):
                case "matmul":
                    x = b.MatMul(q, b.Transpose(keys, perm=[0, 1, 3, 2]))
                case "einsum":
                    x = b.Einsum(q, keys, equation="bhid,bhjd->bhij")
                case _:
                    left, right = b.Unsqueeze(q, b.const([3])), b.Unsqueeze(keys, b.const([2]))
                    x = b.ReduceSum(b.Mul(left, right), b.const([-1]), keepdims=0)
            x = self.spoil(x, spoiled)
            return self.detour(self.masked(x, q, spoiled) if causal else x)

        scores = scores_of(k)
        if spoiled == "random mask":
            noise = b.Sin(b.MatMul(v, b.Transpose(v, perm=[0, 1, 3, 2])))
            scores = b.Mul(scores, noise)
        if spoiled == "softmax":
            scores = b.Softmax(scores, axis=-1)
        if not normalised:
            return b.MatMul(scores, v)
        below = scores if k_below == k else scores_of(k_below)
        total = self.epsilon(b.ReduceSum(below, b.const([-1]), keepdims=1), spoiled)
        if self.pick("before", "after") == "before":
            return b.MatMul(b.Div(scores, total), v)
        return b.Div(b.MatMul(scores, v), total)

    def spoil(self, scores: str, spoiled: str | None) -> str:
        b = self.b
        match spoiled:
            case "exp of scores":
                return b.Exp(scores)
            case "relu of scores":
                return b.Relu(b.Sub(scores, b.const(0.3)))
            case "root of scores":
                return b.Sqrt(b.Abs(scores))
            case "bias below scores":
                return b.Sub(scores, b.const(0.25))
        return scores

    def linear(
        self,
        q: str,
        k: str,
        k_below: str,
        v: str,
        causal: bool,
        normalised: bool,
        spoiled: str | None,
    ) -> str:
        """States first."""
        b = self.b
        if causal:
            transposed = self.chance(0.3)
            if transposed:
                outer = b.Mul(b.Unsqueeze(v, b.const([4])), b.Unsqueeze(k, b.const([3])))
            elif self.chance(0.5):
                outer = b.Einsum(k, v, equation="bhtd,bhte->bhtde")
            else:
                outer = b.Mul(b.Unsqueeze(k, b.const([4])), b.Unsqueeze(v, b.const([3])))
            state = self.detour(b.CumSum(outer, b.const(2)), rank=5)
            if transposed:
                state = b.Transpose(state, perm=[0, 1, 2, 4, 3])
            z = b.CumSum(k_below, b.const(-2)) if normalised else ""
        else:
            if self.chance(0.5):
                state = b.MatMul(b.Transpose(k, perm=[0, 1, 3, 2]), v)
            else:
                state = b.Einsum(k, v, equation="bhsd,bhse->bhde")
            state = self.detour(state)
            z = b.ReduceSum(k_below, b.const([2]), keepdims=1) if normalised else ""
        below = ""
        if normalised:
            below = b.ReduceSum(b.Mul(q, z), b.const([-1]), keepdims=1)
            below = self.epsilon(below, spoiled)
        first = normalised and self.chance(0.3)
        left = b.Div(q, below) if first else q
        if not causal:
            out = b.MatMul(left, state)
        elif self.chance(0.5):
            row = b.MatMul(b.Unsqueeze(left, b.const([3])), state)
            out = b.Squeeze(row, b.const([3]))
        else:
            out = b.Einsum(left, state, equation="bhtd,bhtde->bhte")
        return out if first or not normalised else b.Div(out, below)

    def epsilon(self, total: str, spoiled: str | None) -> str:
        b = self.b
        if spoiled == "denominator squared":
            total = b.Mul(total, total)
        value = float(self.random.choice([0.0, 1e-6, 1e-3]))
        return b.Add(total, b.const(value)) if value else total

    def model(self, layouts: dict[str, str], out: str) -> onnx.ModelProto:
        """The graph as a model, with the shapes that ONNX infers."""
        shapes = {
            "packed": lambda d: ["B", "T", HEADS * d],
            "BTHD": lambda d: ["B", "T", HEADS, d],
            "BHTD": lambda d: ["B", HEADS, "T", d],
            "TBHD": lambda d: ["T", "B", HEADS, d],
        }
        inputs = [
            helper.make_tensor_value_info(
                n, TensorProto.FLOAT, shapes[layout](D_V if n == "v" else D_K)
            )
            for n, layout in layouts.items()
        ]
        self.b.nodes.append(helper.make_node("Identity", [out], ["out"]))
        names: Sequence[str] = ["out", *self.branches]
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]
        graph = helper.make_graph(self.b.nodes, "random", inputs, outputs)
        imports = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        return shape_inference.infer_shapes(model)


def v_like(b: Body, k: str) -> str:
    """Something of the shape of k that is not k."""
    return str(b.Sin(k))


@dataclass
class Tally:
    """What became of some graphs.

    Attributes:
        true, found: graphs with linear attention, and those of them that were fused as they say.
        missed: seed and recipe of the others.
        mistaken: seed and flaw of spoiled graphs that were fused.
        wrong: seed and error of rewritten graphs that compute something else.
    """

    graphs: int = 0
    true: int = 0
    found: int = 0
    missed: list[tuple[int, str]] = field(default_factory=list)
    mistaken: list[tuple[int, str]] = field(default_factory=list)
    wrong: list[tuple[int, float]] = field(default_factory=list)


def tally(seeds: Iterable[int]) -> Tally:
    """Rewrite the graphs of some seeds, and run each rewritten one beside its original."""
    result = Tally()
    for seed in seeds:
        graph = Generator(seed).draw()
        rewritten = passes.rewrite(graph.model, ("canonicalise", "fuse"))
        matches = rewritten.findings.matches
        result.graphs += 1
        if graph.spoiled is None:
            result.true += 1
            # A running sum that a branch reads is an operator of its own, and no other sum is.
            sums = [m for m in matches if m.added[-1].endswith("CumulativeSum")]
            own = [m for m in matches if m not in sums]
            kinds = [(m.causal, m.normalize) for m in own]
            few = len(sums) < len(graph.model.graph.output)
            if few and kinds == [(graph.causal, graph.normalised)]:
                result.found += 1
            else:
                result.missed.append((seed, f"{graph.recipe}: {rewritten.findings}"))
        elif graph.spoiled not in DELAYED and any(
            m.normalize or graph.spoiled not in FAITHFUL for m in matches
        ):
            result.mistaken.append((seed, graph.spoiled))
        error = _difference(graph.model, rewritten.model, seed) if matches else 0.0
        if not error <= ROUNDING:
            result.wrong.append((seed, error))
    return result


def _difference(before: onnx.ModelProto, after: onnx.ModelProto, seed: int) -> float:
    """The largest of all outputs, relative to each one's largest value, at a length not proven."""
    random, sizes = np.random.default_rng(seed), {"B": 2, "T": 33}
    attached = onnx.ModelProto()
    attached.CopyFrom(after)
    attach_functions(attached)
    first, second = _session(before), _session(attached)
    fed = {
        i.name: random.standard_normal([sizes.get(d, d) for d in i.shape]).astype(np.float32)
        for i in first.get_inputs()
    }
    worst = 0.0
    for x, y in zip(first.run(None, fed), second.run(None, fed), strict=True):
        finite = np.isfinite(x)
        if not np.array_equal(finite, np.isfinite(y)):
            return float("inf")
        if finite.any():
            largest = max(float(np.abs(x[finite]).max()), 1e-30)
            worst = max(worst, float(np.abs(x[finite] - y[finite]).max()) / largest)
    return worst


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
