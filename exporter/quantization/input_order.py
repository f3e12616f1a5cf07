"""Inputs of a product in the order in which the blocks of its weight have them.

    MatMul(x, W)  ->  MatMul(Gather(x, order, axis=-1), W[order])

The sum over the inputs has the same terms in another order, each the same product. Weights that
read one value in one order, such as those of queries, keys and values, read one Gather.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Order = NDArray[np.int64]


class InputOrders:
    """Gathers of one graph, each written once."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._gathered: set[str] = set()

    def nodes(self, node: onnx.NodeProto, order: Order) -> Iterator[onnx.NodeProto]:
        """Yield what gathers the first input of a node, unless it is there, and the node.

        Args:
            node: a product; not changed.
            order: inputs of the product, by their places in its weight.
        """
        name = self._names.setdefault(order.tobytes(), f"input_order/{len(self._names)}")
        value = f"{node.input[0]}/{name}"
        if value not in self._gathered:
            self._gathered.add(value)
            yield helper.make_node("Gather", [node.input[0], name], [value], axis=-1)
        product = onnx.NodeProto()
        product.CopyFrom(node)
        product.input[0] = value
        yield product

    def initializers(self) -> Iterator[onnx.TensorProto]:
        """Yield the orders."""
        for order, name in self._names.items():
            yield numpy_helper.from_array(np.frombuffer(order, np.int64), name)
