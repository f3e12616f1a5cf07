"""Feature maps inside kernels: phi of rows of a head, a block of features at a time.

    relu, elu1, exp     component by component, as in ``linexport.models.feature_maps``
    taylor2             [1, x^_i, x^_i x^_j sqrt(1/2) c_ij (i <= j)],   x^ = x / d^(1/4)
    quadratic           [x_i x_j c_ij (i <= j)], with a constant c in front of it [c, sqrt(2c) x_i]
    favor+              m^(-1/2) exp(w_j . x^ - |x^|^2 / 2)

c_ij is 1 where i = j and sqrt(2) elsewhere. Products of x_i and x_j are made by selecting columns
with matrices of zeros and ones, on tensor cores. ``kappa`` is phi(q) . phi(k) from q . k, for the
two maps that have it. Source: docs/math.md, "Feature maps".
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.tiles import components, load_chunk, load_rows


class HeadFeatures(NamedTuple):
    """A map from WIDTH components of a head to FEATURES, and the precision of its products."""

    MAP: str
    WIDTH: int
    FEATURES: int
    PRECISION: str


@triton.jit
def elementwise(x, MAP: tl.constexpr):
    """A map of one component to one feature, computed in float32, in the dtype of x."""
    if MAP == "relu":
        return tl.maximum(x, 0.0).to(x.dtype)
    elif MAP == "elu1":
        wide = x.to(tl.float32)
        return (tl.maximum(wide, 0.0) + tl.exp(tl.minimum(wide, 0.0))).to(x.dtype)
    elif MAP == "exp":
        return tl.exp(x.to(tl.float32)).to(x.dtype)
    else:
        tl.static_assert(MAP == "identity")
        return x


@triton.jit
def monomials(columns, WIDTH: tl.constexpr, LEADING: tl.constexpr):
    """Components i <= j that feature m multiplies; in front of the products, i = m - 1."""
    # Row i of the triangle i <= j starts at i d - i (i - 1) / 2: i is the last row that starts
    # at or before p, and j the place in it.
    p = columns - LEADING
    i = columns * 0
    for row in range(1, WIDTH):
        i += (p >= row * WIDTH - row * (row - 1) // 2).to(tl.int32)
    j = p - (i * WIDTH - i * (i - 1) // 2) + i
    leading = columns < LEADING
    return tl.where(leading, columns - 1, i), tl.where(leading, columns - 1, j)


@triton.jit
def degree_two(
    first, second, i, j, columns, parameter, WIDTH: tl.constexpr, LEADING: tl.constexpr, MAP
):
    """Features from the components x_i and x_j, and columns of a last axis."""
    constant, linear, product = 1.0, 1.0, 1.0
    if MAP == "taylor2":
        linear = tl.exp2(-0.25 * tl.log2(WIDTH * 1.0))
        product = linear * linear * 0.70710678118654752
    elif parameter is not None:
        constant = tl.load(parameter)
        linear = tl.sqrt(2.0 * constant)
    y = first * second * tl.where(i == j, product, product * 1.4142135623730951)
    if LEADING > 0:
        y = tl.where(columns < LEADING, first * linear, y)
        y = tl.where(columns == 0, constant, y)
    return y


@triton.jit
def in_three(w):
    """w as a sum of three bfloat16: together they have the 24 digits of float32."""
    high = w.to(tl.bfloat16)
    rest = w - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def plus_products(y, x, w, PRECISION: tl.constexpr):
    """y + x w, x of any type and w in float32, with the digits of float32; the smallest first.

    bfloat16 has half the cost of TensorFloat-32 for each digit of w, and a factor of that type is
    exact. float16 is the sum of two, where what is left out is below 2^-26 of the whole.
    """
    if x.dtype == tl.float32:
        return y + tl.dot(x, w, input_precision=PRECISION)
    else:
        high, middle, low = in_three(w)
        if x.dtype == tl.bfloat16:
            return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, y)))
        else:
            first = x.to(tl.bfloat16)
            second = (x.to(tl.float32) - first.to(tl.float32)).to(tl.bfloat16)
            y = tl.dot(second, middle, tl.dot(first, low, y))
            return tl.dot(first, high, tl.dot(second, high, tl.dot(first, middle, y)))


@triton.jit
def exponents(base, live, columns, parameter, STRIDE: tl.constexpr, phi):
    """Logarithms of the features of favor+, in float32, for some columns of rows.

    Products and norms are summed over slices of the width, the longest that do not spill. Sums are
    multiplied by d^(-1/4), so that x is read as it is stored. m^(-1/2) goes into the exponent.
    """
    SLICE: tl.constexpr = 32 if base.dtype.element_ty == tl.bfloat16 else 16
    y = tl.zeros((live.shape[0], columns.shape[0]), tl.float32)
    norm = tl.zeros((live.shape[0],), tl.float32)
    for start in range(0, phi.WIDTH, SLICE):
        parts = start + tl.arange(0, SLICE)
        x = load_rows(base, live, parts, STRIDE, phi.WIDTH)
        inside = (parts < phi.WIDTH)[:, None] & (columns < phi.FEATURES)[None, :]
        at = parts[:, None] * phi.FEATURES + columns[None, :]
        w = tl.load(parameter + at, mask=inside, other=0.0)
        y = plus_products(y, x, w, phi.PRECISION)
        wide = x.to(tl.float32)
        norm += tl.sum(wide * wide, 1)
    scale = tl.exp2(-0.25 * tl.log2(phi.WIDTH * 1.0))
    norm = norm * (0.5 * scale * scale) + 0.5 * tl.log(phi.FEATURES * 1.0)
    return y * scale - norm[:, None]


@triton.jit
def features(base, live, columns, parameter, STRIDE: tl.constexpr, phi):
    """Some columns of the features of rows of components, at a stride of STRIDE elements.

    In the dtype of these, but float32 for the maps of degree two: their features take both signs
    and cancel, so that rounding them shows. Where a row is not live or a column lies past FEATURES,
    the result means nothing.
    """
    if phi.MAP == "taylor2" or phi.MAP == "quadratic":
        # Features before the products: a constant and the components, where the map has them.
        LEADING: tl.constexpr = phi.FEATURES - phi.WIDTH * (phi.WIDTH + 1) // 2
        parts = components(phi.WIDTH)
        x = load_rows(base, live, parts, STRIDE, phi.WIDTH)
        i, j = monomials(columns, phi.WIDTH, LEADING)
        select_i = (parts[:, None] == i[None, :]).to(x.dtype)
        select_j = (parts[:, None] == j[None, :]).to(x.dtype)
        first = tl.dot(x, select_i, input_precision=phi.PRECISION)
        second = tl.dot(x, select_j, input_precision=phi.PRECISION)
        y = degree_two(
            *(first, second, i[None, :], j[None, :], columns[None, :], parameter),
            *(phi.WIDTH, LEADING, phi.MAP),
        )
        return y
    elif phi.MAP == "favor+":
        y = exponents(base, live, columns, parameter, STRIDE, phi)
        return tl.exp(y).to(base.dtype.element_ty)
    else:
        return elementwise(load_rows(base, live, columns, STRIDE, phi.FEATURES), phi.MAP)


@triton.jit
def projection(base, parts, columns, inside, parameter, WIDTH: tl.constexpr, FEATURES):
    """x^ of some components of a token, and what w has for them."""
    x = tl.load(base + parts, mask=parts < WIDTH, other=0.0).to(tl.float32)
    x *= tl.exp2(-0.25 * tl.log2(WIDTH * 1.0))
    both = (parts < WIDTH)[:, None] & inside[None, :]
    at = parts[:, None] * FEATURES + columns[None, :]
    return x, tl.load(parameter + at, mask=both, other=0.0)


@triton.jit
def token_exponents(base, columns, inside, parameter, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """Logarithms of the features of favor+ of one token.

    A projection that does not fit in the registers of four warps is read in slices of the width,
    whose products are summed over threads once.
    """
    SLICE: tl.constexpr = 8
    norm = 0.5 * tl.log(FEATURES * 1.0)
    if triton.next_power_of_2(WIDTH) * columns.shape[0] <= 128 * 128:
        parts = components(WIDTH)
        x, w = projection(base, parts, columns, inside, parameter, WIDTH, FEATURES)
        norm = 0.5 * tl.sum(x * x, 0) + norm
        return tl.sum(x[:, None] * w, 0) - norm
    else:
        squares = tl.zeros((SLICE,), tl.float32)
        products = tl.zeros((SLICE, columns.shape[0]), tl.float32)
        for start in range(0, WIDTH, SLICE):
            parts = start + tl.arange(0, SLICE)
            x, w = projection(base, parts, columns, inside, parameter, WIDTH, FEATURES)
            squares += x * x
            products += x[:, None] * w
        norm += 0.5 * tl.sum(squares, 0)
        return tl.sum(products, 0) - norm


@triton.jit
def token_features(
    base, columns, parameter, WIDTH: tl.constexpr, FEATURES: tl.constexpr, MAP: tl.constexpr
):
    """The features of one token, in float32, zero past FEATURES."""
    inside = columns < FEATURES
    if MAP == "taylor2" or MAP == "quadratic":
        LEADING: tl.constexpr = FEATURES - WIDTH * (WIDTH + 1) // 2
        i, j = monomials(columns, WIDTH, LEADING)
        first = tl.load(base + i, mask=inside & (i >= 0), other=0.0).to(tl.float32)
        second = tl.load(base + j, mask=inside & (j >= 0), other=0.0).to(tl.float32)
        y = degree_two(first, second, i, j, columns, parameter, WIDTH, LEADING, MAP)
    elif MAP == "favor+":
        y = tl.exp(token_exponents(base, columns, inside, parameter, WIDTH, FEATURES))
    else:
        y = elementwise(tl.load(base + columns, mask=inside, other=0.0), MAP).to(tl.float32)
    return tl.where(inside, y, 0.0)


@triton.jit
def load_keys(base, keep, columns, parameter, STRIDE: tl.constexpr, phi):
    """phi of rows of keys; zero for padded tokens and columns, whatever phi(0) is."""
    keys = features(base, keep, columns, parameter, STRIDE, phi)
    if phi.MAP != "identity" and phi.MAP != "relu":
        inside = keep[:, None]
        if tl.cdiv(phi.FEATURES, columns.shape[0]) * columns.shape[0] != phi.FEATURES:
            inside = inside & (columns < phi.FEATURES)[None, :]
        keys = tl.where(inside, keys, 0.0).to(keys.dtype)
    return keys


@triton.jit
def chunk_keys(
    decayed,
    base,
    offset,
    keep,
    columns,
    parameter,
    STRIDE: tl.constexpr,
    DECAYS: tl.constexpr,
    phi,
):
    """Keys of the chunk at ``offset``: those that ``channels`` decayed, or ``load_keys``."""
    if DECAYS > 1:
        return load_chunk(decayed + offset * phi.FEATURES, columns, keep.shape[0], phi.FEATURES)
    else:
        return load_keys(base + offset * STRIDE, keep, columns, parameter, STRIDE, phi)


@triton.jit
def kappa(t, parameter, phi):
    """phi(q) . phi(k) as a function of t = q . k."""
    if phi.MAP == "taylor2":
        t *= tl.exp2(-0.5 * tl.log2(phi.WIDTH * 1.0))
        return 1.0 + t * (1.0 + 0.5 * t)
    else:
        if parameter is not None:
            t += tl.load(parameter)
        return t * t
