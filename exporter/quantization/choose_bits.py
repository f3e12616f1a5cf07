"""Bits and values for every weight of a float32 artifact.

int8, int4   all products in these bits; tables such as embeddings in 8, which costs little
             memory and much divergence otherwise
fp8          floats of 8 bits
auto         4 or 8 bits for each, 8 where it buys most, until a limit of divergence holds

int8, int4 and fp8 of language models are chosen one after another, for inputs that the quantised
weights before them give; auto, and other models, for inputs of the float32 model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linexport.artifact.temporary import Arrays
from linexport.errors import UnsupportedModelError
from linexport.manifest.options import KEEP
from linexport.quantization.allocate import Allocation, StorageOption, allocations
from linexport.quantization.block_quantisation import Grid, Matrix, Quantised, nearest
from linexport.quantization.engine_experts import as_one_layer
from linexport.quantization.expert_products import without_kernel
from linexport.quantization.experts import find_experts
from linexport.quantization.form import StorageForm
from linexport.quantization.gptq import CalibratedInputs, gptq
from linexport.quantization.half import HALF
from linexport.quantization.layer_chain import LayerChain
from linexport.quantization.opened import FloatModel, SecondMoments, second_moments, smallest
from linexport.quantization.quantisable import MIXED_BITS, TABLE_BITS, KeptWeight, Weight, find
from linexport.quantization.sensitivity import stored
from linexport.system import memory
from linexport.system.progress import Advance

BITS = {"int8": 8, "int4": 4, "fp8": 8}
AUTO = "auto"
CHOICES = (*HALF, *BITS, AUTO, KEEP)
MOMENT_BYTES = 2**31
"""Second moments, in mapped files, that are measured in one run over the data."""


def ignore(done: int, note: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Chosen:
    """A quantised weight.

    Attributes:
        weight: the weight.
        quantised: its values.
        method: "gptq", "nearest", or "checkpoint" for integers that are kept.
    """

    weight: Weight
    quantised: Quantised
    method: str

    @property
    def bytes(self) -> int:
        """Size of values, scales and zero points."""
        return sum(array.nbytes for array in self.quantised.packed().values())


class Quantiser:
    """Weights of one model and what is known of their inputs.

    Args:
        model: the model, computed in float32.
        form: how its target stores them.
        integers: kernels for integer weights must have what is found.

    Attributes:
        weights: weights that can be quantised.
        kept: those that stay, with the reason.

    Raises:
        UnsupportedModelError: nothing can be quantised, or a weight is not finite.
    """

    def __init__(self, model: FloatModel, form: StorageForm, integers: bool = True) -> None:
        products, kept = find(model.graph, model.values)
        experts, others = find_experts(model.graph, model.values, integers)
        if integers and form.experts == "none":
            reason = "experts in integers would become float32 in every call, all of them"
            others = [*others, *(KeptWeight(w.name, reason) for w in experts)]
            experts = []
        if form.experts == "products":
            experts = [without_kernel(w, w.experts) for w in experts if w.experts]
        if form.experts == "one layer":
            experts = [as_one_layer(w, w.experts) for w in experts if w.experts]
        self.weights, self.kept = [*products, *experts], [*kept, *others]
        if not self.weights:
            reasons = "; ".join(f"{k.name}: {k.reason}" for k in self.kept[:3]) or "it has none"
            raise UnsupportedModelError(
                f"{model.artifact.path} has no matrix products whose weights could be quantised "
                f"({reasons})."
            )
        for weight in self.weights:
            if not np.isfinite(model.values[weight.name]).all():
                raise UnsupportedModelError(
                    f"The weight {weight.name} has NaN or infinite values; expected finite ones."
                )
        self._model, self._form = model, form
        self._calibrated: dict[str, CalibratedInputs] = {}
        self._done: dict[tuple[str, int], Chosen] = {}

    def calibrate(self, data: Sequence[Arrays], advance: Advance = ignore) -> None:
        """Measure how the inputs of all products vary together; ``advance`` is shown the runs.

        Products read experts whose router gives negative weights: the kernel leaves those out.
        """
        self.check_routers(data[0])
        done = 0
        for part in _together({w.activations[0]: w.inputs for w in self.weights if w.activations}):
            found = second_moments(self._model, part, data)
            self._calibrated |= {name: CalibratedInputs(own) for name, own in found.items()}
            done += len(part)
            advance(done, part[-1])

    def check_routers(self, feeds: Arrays) -> None:
        """Have products read experts whose router gives negative weights for these inputs."""
        if self.shares:
            self.leave_kernel(smallest(self._model, self.shares, feeds))

    @property
    def shares(self) -> set[str]:
        """Values that say how much each expert of a token counts."""
        return {w.experts.share for w in self.weights if w.experts}

    def leave_kernel(self, found: Mapping[str, float]) -> None:
        """Have products read the weights of experts whose router gives negative weights.

        Args:
            found: smallest of them, by the names of ``shares``.
        """
        self.weights = [
            without_kernel(w, w.experts) if w.experts and found.get(w.experts.share, 0.0) < 0 else w
            for w in self.weights
        ]

    def by_layers(
        self, exact: LayerChain, made: LayerChain, bits: int, advance: Advance
    ) -> list[Chosen]:
        """Quantise all weights, one after another, each for inputs that earlier ones made inexact.

        Args:
            exact: the layers, on calibration data.
            made: the same, whose weights become the quantised ones.
            bits: see ``uniform``.
            advance: shown the number of weights done, and the name of the last.
        """
        for table in (w for w in self.weights if w.is_table):
            self._replace(made, self.quantise(table, self._bits(table, bits)))
        for index in range(len(exact.segments)):
            computed, own = exact.computes(index), []
            names = [name for name in self._inputs() if name in computed]
            exact.values(index, [*names, *self._shares(names)])
            for name in names:
                own += self._quantise_for(name, index, exact, made, bits)
                advance(len({name for name, _ in self._done}), own[-1].name if own else name)
            exact.leave(index)
            made.leave(index)
            done = {use.weight for weight in own for use in weight.uses}
            made.replace({name: self._model.values[name] for name in done})
        return self.uniform(bits)

    def _inputs(self) -> list[str]:
        """Values that weights are multiplied with, in the order of the graph, to quantise for."""
        left = [w for w in self.weights if w.activations and not self._quantised(w)]
        return list(dict.fromkeys(w.activations[0] for w in left))

    def _quantise_for(
        self, name: str, index: int, exact: LayerChain, made: LayerChain, bits: int
    ) -> list[Weight]:
        """Quantise the weights that are multiplied with one value; returns them.

        Args:
            name: of the value.
            index: of the layer that computes it.
            exact: the layers of the float32 model.
            made: the layers with the quantised weights before.
            bits: see ``uniform``.
        """
        shares = dict.fromkeys(self._shares([name]), 0.0)
        names = [name, *shares]
        few = self._few_outputs(name)
        moments, errors = SecondMoments(), SecondMoments()
        both = zip(exact.values(index, names), made.values(index, names), strict=True)
        for true, found in both:
            moments.add(name, found[name])
            apart = true[name] - found[name]
            for reader, matrix in few.items():
                errors.add(reader, apart @ matrix.T, found[name])
            if not few:
                errors.add(name, apart, found[name])
            shares = {n: min(least, float(true[n].min())) for n, least in shares.items()}
        self.leave_kernel(shares)
        lost = errors.means()
        inputs = CalibratedInputs(moments.means()[name], lost.get(name), lost if few else None)
        self._calibrated = {name: inputs}
        own = self._reading(name)
        for weight in own:
            self._replace(made, self.quantise(weight, self._bits(weight, bits)))
        self._calibrated = {}
        return own

    def _few_outputs(self, name: str) -> dict[str, Matrix]:
        """Return the matrices (N, K) that read a value, by name, if they have few outputs.

        E[W (x - y) y^T] takes 4 N K operations a token, and E[(x - y) y^T] 2 K^2.
        """
        own = self._reading(name)
        few = 2 * sum(weight.outputs for weight in own) <= own[0].inputs
        if not few or any(weight.experts for weight in own):
            return {}
        return {w.name: w.matrix(self._model.values[w.name]) for w in own}

    def _shares(self, names: Sequence[str]) -> list[str]:
        """Return the values that say how much each expert counts that is multiplied with these."""
        reading = [weight for name in names for weight in self._reading(name)]
        return list(dict.fromkeys(w.experts.share for w in reading if w.experts))

    def _reading(self, name: str) -> list[Weight]:
        """Return the weights that are multiplied with a value first."""
        return [w for w in self.weights if w.activations[:1] == (name,)]

    def _replace(self, chain: LayerChain, chosen: Chosen) -> None:
        values = stored(chosen.weight, chosen.quantised.matrix(), self._model.values)
        chain.replace(dict(zip(values, memory.memory_mapped(list(values.values())), strict=True)))

    def _quantised(self, weight: Weight) -> bool:
        return any(name == weight.name for name, _ in self._done)

    @staticmethod
    def _bits(weight: Weight, bits: int) -> int:
        return max(bits, TABLE_BITS) if weight.is_table else bits

    def grid(self, weight: Weight, bits: int) -> Grid:
        """Return how a weight is stored in so many bits."""
        return self._form.grid(weight, bits, self._model.type_of(weight.name))

    @property
    def measured(self) -> int:
        """Number of values that ``calibrate`` measures."""
        return len({w.activations[0] for w in self.weights if w.activations})

    def quantise(self, weight: Weight, bits: int) -> Chosen:
        """Quantise one weight; kept for later calls."""
        if (weight.name, bits) not in self._done:
            matrix = weight.matrix(self._model.values[weight.name])
            grid = self.grid(weight, bits)
            name = weight.activations[0] if weight.activations else ""
            inputs = self._calibrated.get(name)
            if inputs is None:
                found, method = nearest(matrix, grid), "nearest"
            else:
                target = inputs.target(weight.name, matrix)
                # What is chosen for inexact inputs gains nothing from going to its best in turn.
                found, method = gptq(target, grid, inputs, descends=inputs.exact), "gptq"
            values, scales, zeros = memory.memory_mapped([found.values, found.scales, found.zeros])
            found = replace(found, values=values, scales=scales, zeros=zeros)
            made = Chosen(weight, found, method)
            self._done[weight.name, bits] = made
            memory.trim_memory()
        return self._done[weight.name, bits]

    def uniform(self, bits: int, advance: Advance = ignore) -> list[Chosen]:
        """Quantise all weights; tables in at least ``TABLE_BITS``."""
        chosen = []
        for done, weight in enumerate(self.weights, 1):
            chosen.append(self.quantise(weight, self._bits(weight, bits)))
            advance(done, weight.name)
        return chosen

    def mixed(self, divergences: dict[str, float]) -> list[Allocation]:
        """Return choices of 4 or 8 bits from the smallest on, with the divergence they predict.

        Args:
            divergences: of each weight alone in 4 bits, nats.
        """
        options = [
            [
                StorageOption(
                    bits,
                    sum(w.outputs * self.grid(w, bits).row_bytes(w.inputs) for w in group),
                    sum(divergences[w.name] for w in group) * 4.0 ** (4 - bits),
                )
                for bits in self._choices(group)
            ]
            for group in self.groups()
        ]
        return list(allocations(options))

    def allocated(self, allocation: Allocation) -> list[Chosen]:
        """Quantise all weights as an allocation of ``mixed`` says."""
        return [
            self.quantise(weight, self._choices(group)[index])
            for group, index in zip(self.groups(), allocation.choice, strict=True)
            for weight in group
        ]

    def _choices(self, group: Sequence[Weight]) -> tuple[int, ...]:
        """Bits that these weights may have."""
        looked_up = any(weight.is_table for weight in group)
        few = not looked_up or self._form.few_bits_looked_up
        return MIXED_BITS if few else (TABLE_BITS,)

    def groups(self) -> list[list[Weight]]:
        """Return weights that have the same bits: those of a mixture of experts, others alone."""
        groups: dict[str | int, list[Weight]] = {}
        for weight in self.weights:
            key = weight.uses[0].node if weight.experts else weight.name
            groups.setdefault(key, []).append(weight)
        return list(groups.values())


def _together(widths: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield names of values whose moments are measured in one run, by ``MOMENT_BYTES``."""
    part: list[str] = []
    size = 0
    for name, width in sorted(widths.items()):
        own = 8 * width**2
        if part and size + own > MOMENT_BYTES:
            yield part
            part, size = [], 0
        part.append(name)
        size += own
    if part:
        yield part
