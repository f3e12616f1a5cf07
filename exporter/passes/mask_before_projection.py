"""Where(mask, x W, 0) -> Where(mask, x, 0) W, for a mask of tokens.

What a padded token gives a convolution is left out behind the projection, where a bias would be
left out too. Without a bias zeros may enter the projection as well: a row of zeros times finite
weights is zeros. There are fewer numbers to choose in front of a projection that widens, and
runtimes find the projection next to the operator that reads it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import is_output, producer
from linexport.graph.tensors import known_shape

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Masked:
    """A projection whose rows a mask chooses.

    Attributes:
        mask: with a last axis of size 1.
        product: x W.
        zero: what stands in the other rows.
    """

    mask: gs.Tensor
    product: gs.Node
    zero: gs.Constant


def run(graph: gs.Graph) -> PassResult:
    """Mask what goes into a projection, where its result is as wide or wider."""
    return rewrite_matches(graph, _match, _rewrite, log)


def _match(graph: gs.Graph, node: gs.Node) -> _Masked | None:
    """Return what is masked, if a node chooses rows of a projection or zeros."""
    if node.op != "Where" or node.domain:
        return None
    mask, value, zero = node.inputs
    product = producer(value, "MatMul")
    if product is None or not isinstance(zero, gs.Constant) or zero.values.size != 1:
        return None
    x, weight = product.inputs
    if not isinstance(weight, gs.Constant) or len(weight.shape) != 2 or zero.values.item() != 0:
        return None
    if len(value.outputs) != 1 or is_output(graph, value):
        raise NoMatchError("its rows are read without the mask as well")
    if not mask.shape or not x.shape or len(mask.shape) != len(x.shape) or mask.shape[-1] != 1:
        raise NoMatchError("its mask is not one of tokens")
    if weight.shape[0] > weight.shape[1]:
        raise NoMatchError("what goes into the projection is wider than what comes out")
    return _Masked(mask, product, zero)


def _rewrite(graph: gs.Graph, node: gs.Node, found: _Masked) -> None:
    """Exchange the two; the product takes the name of what was chosen."""
    x, weight = found.product.inputs
    sizes = node.outputs[0].shape  # a mask may have more rows than x
    shape = sizes and [*sizes[:-1], known_shape(weight)[0]]
    masked = gs.Variable(f"{node.outputs[0].name}/masked", found.zero.dtype, shape)
    zero = gs.Constant(f"{masked.name}/zero", np.zeros((), found.zero.dtype))
    name, (output,) = found.product.name, node.outputs
    node.outputs = []
    graph.nodes.append(gs.Node("Where", f"{node.name}/masked", {}, [found.mask, x, zero], [masked]))
    graph.nodes.append(gs.Node("MatMul", f"{name}/of_masked", {}, [masked, weight], [output]))


PASS = Pass(
    name="mask_before_projection",
    stage="tidy",
    ensures="no mask of tokens chooses rows of a projection without bias that widens",
    run=run,
)
