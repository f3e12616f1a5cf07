"""Peers of the kernels: flash-linear-attention, and softmax attention of torch.

Both are timed where they are installed; the checks need neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu.attention import Attention
from gpu.case import Case

LONGEST = 2**14
"""Tokens up to which softmax attention is timed."""


def times(case: Case) -> dict[str, Any]:
    """Milliseconds of each peer, or why there are none: a peer's failure is not ours."""
    found: dict[str, Any] = {"fla_ms": None, "softmax_ms": None}
    fla_reason, softmax_reason = "has no such operation", "no attention, one token or too long"
    if isinstance(case, Attention) and case.peer:
        found["fla_ms"], fla_reason = _measured(_fla, case)
    if isinstance(case, Attention) and 8 < case.length <= LONGEST:
        found["softmax_ms"], softmax_reason = _measured(_softmax, case)
    return {**found, "fla_reason": fla_reason, "softmax_reason": softmax_reason}


def _measured(prepare: Callable[[Attention], Any], case: Attention) -> tuple[float | None, str]:
    try:
        import torch

        with torch.no_grad():
            return _milliseconds(prepare(case)), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:200]


def _milliseconds(call: Callable[[], object], replays: int = 20) -> float:
    """Median time of replays of a captured graph; of the call itself where it can't be captured."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    repeat: Callable[[], object] = call
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            call()
        repeat = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
    taken = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        repeat()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    torch.cuda.empty_cache()
    return float(np.median(taken[2:]))


def _tensors(case: Attention) -> dict[str, Any]:
    """Random inputs as the case has them, split into heads."""
    import torch

    found, value_width = {}, case.value_width or case.width
    for name, shape in case.shapes().items():
        x = torch.randn(shape, device="cuda")
        if name == "decay":
            x = -x.abs() / 8
        if name == "beta":
            x = torch.sigmoid(x)
        if name in ("query", "key", "value"):
            x = x.unflatten(-1, (-1, value_width if name == "value" else case.width))
            if case.heads > x.shape[2]:  # shared by heads of values
                x = x.repeat_interleave(case.heads // x.shape[2], 2)
        if name == "decay" and case.channel:
            x = x.unflatten(-1, (case.heads, -1))
        if name == "key" and case.spec.has_beta:
            x = torch.nn.functional.normalize(x, dim=-1)
        found[name] = x if name.startswith("past") else x.to(getattr(torch, case.dtype))
    return found


def _fla(case: Attention) -> Callable[[], object]:
    given = _tensors(case)
    q, k, v = (given[name] for name in ("query", "key", "value"))
    g, beta = given.get("decay"), given.get("beta")
    common = {"scale": case.width**-0.5, "initial_state": given["past_state"]}
    common["output_final_state"] = True
    from fla import ops

    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: ops.chunk_linear_attn(q, k, v, normalize=False, **common),
        "simple_gla": lambda: ops.chunk_simple_gla(q, k, v, g=g, **common),
        "gla": lambda: ops.chunk_gla(q, k, v, g=g, **common),
        "delta": lambda: ops.chunk_delta_rule(q, k, v, beta=beta, **common),
        "gated_delta": lambda: ops.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **common),
        "kda": lambda: ops.chunk_kda(q, k, v, g=g, beta=beta, **common),
        "linear step": lambda: ops.fused_recurrent_linear_attn(q, k, v, normalize=False, **common),
        "gated_delta step": lambda: ops.fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, **common
        ),
    }
    return calls[case.peer]


def _softmax(case: Attention) -> Callable[[], object]:
    import torch

    given = _tensors(case)
    q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, is_causal=case.causal, enable_gqa=True)
