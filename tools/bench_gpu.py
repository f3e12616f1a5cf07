"""The GPU kernels: compiled, checked against float64, timed beside their floors and their peers.

    python tools/bench_gpu.py [--json FILE] [--quick] [--sm 90]

One call does all, in under five minutes. Kernels are the ahead-of-time binaries that engines hold,
launched through the CUDA driver exactly as the plugins launch them. A floor is the bytes that must
be moved over the copy bandwidth measured in the same run. Peers are timed where they are installed:
flash-linear-attention, and softmax attention of torch. Times are medians of replayed CUDA graphs.

Without a GPU the kernels are compiled for ``--sm``, what the assembler made of them is printed, and
the table has floors only: the exit code is then 5.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import measurement
import numpy as np
import torch
from gpu_cases import CASES, Attention, Case, small

from linexport.errors import EnvironmentProblemError, LinexportError
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.gate import inspect
from linexport.plugins.kernels.launch import LaunchPlan
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.ops.registry import all_ops
from linexport.plugins.tensorrt.contract import architectures, describe_plugin
from linexport.plugins.tensorrt.launcher import Launcher, capability
from linexport.system import environment

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Relative, in the Euclidean norm. Looser than in the interpreter by the rounding of tensor cores'
operands, which it does not have."""


COPY = 4.3e12
"""Bytes a second of a copy on an H200, measured: floors where no GPU is at hand."""


class Prepared:
    """A case on the GPU: binaries loaded, tensors filled, ready to be enqueued."""

    def __init__(self, case: Case, sm: int) -> None:
        self.case = case
        self.given = case.tensors("cuda")
        node = case.node()
        self.out = case.results(self.given, plans(case, sm).in_place)
        self.launcher = Launcher(describe_plugin(all_ops()[node.op_type], node, case.dtype, [sm]))
        need = self.launcher.description.scratch(self.launcher.sm, case.batch, case.length)
        self.workspace = torch.empty(max(need, 1), dtype=torch.uint8, device="cuda")
        description = self.launcher.description
        tensors = {**self.given, **self.out}
        self.addresses = [tensors[t.name].data_ptr() if t else 0 for t in description.tensors]
        self.shapes = [tuple(tensors[t.name].shape) if t else () for t in description.inputs]

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        workspace = self.workspace.data_ptr()
        self.launcher.enqueue(self.shapes, self.addresses, workspace, stream)


def check(case: Case, sm: int) -> dict[str, Any]:
    """Run at a small size and compare with the oracle, in place where there is a past."""
    prepared = Prepared(case, sm)
    arrays = {n: x.double().cpu().numpy() for n, x in prepared.given.items()}
    prepared()
    torch.cuda.synchronize()
    errors = {}
    for name, want in case.wanted(arrays).items():
        got = prepared.out[name].double().cpu().numpy()
        errors[name] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    passed = all(e <= TOLERANCE[case.dtype] for e in errors.values())
    return {"case": case.name, "dtype": case.dtype, "errors": errors, "passed": passed}


def milliseconds(call: Callable[[], object], replays: int = 20) -> float:
    """Median time of one call, by events around replays of a captured graph.

    A call that cannot be captured is timed as it is.
    """
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
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        repeat()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times[2:]))


def bandwidth() -> float:
    """Bytes read and written a second by a copy of 4 GB within the device."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1000)


def peer(case: Attention) -> Callable[[], object]:
    """Return a call of the case's operation in flash-linear-attention.

    Raises:
        ImportError: it is not installed, or does not have it.
    """
    given = case.tensors("cuda")
    heads = (case.heads, case.width)
    q, k, v = (given[n].unflatten(-1, heads) for n in ("query", "key", "value"))
    g, beta = given.get("decay"), given.get("beta")
    if g is not None and case.channel:
        g = g.unflatten(-1, heads)
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


def softmax(case: Attention) -> Callable[[], object]:
    """Causal softmax attention of torch on the same query, key and value."""
    given = case.tensors("cuda")
    split = (given[n].unflatten(-1, (case.heads, case.width)) for n in ("query", "key", "value"))
    q, k, v = (x.transpose(1, 2) for x in split)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, is_causal=case.causal)


def measured(
    prepare: Callable[[Attention], Callable[[], object]], case: Attention
) -> tuple[float | None, str | None]:
    """Milliseconds of what is prepared, or why there are none: a peer's failure is not ours."""
    try:
        with torch.no_grad():
            return milliseconds(prepare(case)), None
    except Exception as error:
        torch.cuda.empty_cache()
        return None, f"{type(error).__name__}: {error}"[:200]


def roofline(case: Case, bytes_per_second: float) -> dict[str, Any]:
    """A case with the least time it can take, and no time yet."""
    size = case.bytes()
    floor = size / bytes_per_second * 1000
    return {**asdict(case), "bytes": size, "floor_ms": floor, "ms": None, "ratio_to_floor": None}


def timed(case: Case, sm: int, bytes_per_second: float) -> dict[str, Any]:
    """Times of a case and its peers, and its floor."""
    row = roofline(case, bytes_per_second)
    floor = row["floor_ms"]
    ours = milliseconds(Prepared(case, sm))
    torch.cuda.empty_cache()
    fla, fla_reason = None, "has no such operation"
    sdpa, sdpa_reason = None, "one token" if case.length == 1 else "too long"
    if not isinstance(case, Attention):
        sdpa_reason = "no attention"
    elif 1 < case.length <= 2**14:
        sdpa, sdpa_reason = measured(softmax, case)
    if isinstance(case, Attention) and case.peer:
        fla, fla_reason = measured(peer, case)
    torch.cuda.empty_cache()
    return {
        **row,
        "ms": ours,
        "ratio_to_floor": ours / floor,
        "within_target": None if case.target is None else ours <= case.target * floor,
        "fla_ms": fla,
        "fla_reason": fla_reason,
        "softmax_ms": sdpa,
        "softmax_reason": sdpa_reason,
    }


def plans(case: Case, sm: int) -> LaunchPlan:
    """Return the launch plan of a case for one compute capability."""
    return plan_launches(case.node(), case.dtype, sm)


def findings(sm: int, cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """Compile every kernel and read what the assembler made of it."""
    rows = []
    seen: set[str] = set()
    for case in cases:
        kernels = [k for k in plans(case, sm).kernels() if k.name not in seen]
        binaries = compile_kernels(kernels, sm)
        for kernel in kernels:
            seen.add(kernel.name)
            binary = binaries[kernel.name]
            row = {"case": case.name, "kernel": kernel.function, "sm": sm, "shared": binary.shared}
            rows.append({**row, **asdict(inspect(binary))})
    return rows


def machine() -> dict[str, Any]:
    """Describe the machine of the run: its software and its GPU."""
    found = {**environment.describe(), "triton": environment.version("triton")}
    found["flash-linear-attention"] = environment.version("flash-linear-attention")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        found["cuda"] = torch.version.cuda
    return found


def without_gpu(sm: int, cases: tuple[Case, ...]) -> dict[str, Any]:
    """Compile without a GPU, and count spills and tensor-core instructions."""
    rows = findings(sm, cases)
    for row in rows:
        print(
            f"{row['case']:34} {row['kernel']:30} registers {row['registers']:3}, "
            f"spilled {row['spilled']} B, {row['instructions']} {' '.join(row['warnings'])}"
        )
    table = [roofline(case, COPY) for case in cases]
    print(HEADER, *map(line, table), sep="\n")
    print(f"Compiled for compute capability {sm / 10:.1f}. No GPU: nothing was run or timed.")
    return {"status": "no_gpu", "machine": machine(), "findings": rows, "times": table}


def on_gpu(cases: tuple[Case, ...]) -> dict[str, Any]:
    """Check everything, then time everything."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    (sm,) = architectures([capability()])
    dtypes = ("float32", "float16", "bfloat16")
    checks = [check(small(case, dtype), sm) for case in cases for dtype in dtypes]
    for row in checks:
        if not row["passed"]:
            print(f"WRONG {row['case']} {row['dtype']}: {row['errors']}")
    worst = {d: max(max(r["errors"].values()) for r in checks if r["dtype"] == d) for d in dtypes}
    print("Largest relative errors:", ", ".join(f"{d} {e:.1e}" for d, e in worst.items()))
    speed = bandwidth()
    print(f"Copy bandwidth {speed / 1e12:.2f} TB/s")
    rows = []
    print(HEADER)
    for case in cases:
        rows.append(row := timed(case, sm, speed))
        print(line(row), flush=True)
    right = all(r["passed"] for r in checks)
    return {
        "status": "ok" if right else "wrong",
        "machine": machine(),
        "bandwidth": speed,
        "checks": checks,
        "times": rows,
    }


HEADER = """| case | floor, ms | time, ms | times the floor | wanted | fla, ms | softmax, ms |
|---|---|---|---|---|---|---|"""


def line(row: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    target = "" if row["target"] is None else f"{row['target']:.1f}"
    times = [number(row[n], d) for n, d in (("floor_ms", 3), ("ms", 3), ("ratio_to_floor", 2))]
    peers = [f"{row[p]:.3f}" if row.get(p) else "" for p in ("fla_ms", "softmax_ms")]
    return f"| {' | '.join([row['name'], *times, target, *peers])} |"


def number(value: float | None, digits: int) -> str:
    """Format a number for the table."""
    return "unmeasured" if value is None else f"{value:.{digits}f}"


def main() -> int:
    """Exit code 0: all right; 3: a kernel is wrong; 5: no GPU."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measurement.add_option(options)
    options.add_argument("--quick", action="store_true", help="the first case of each kind only")
    options.add_argument("--sm", type=int, default=90, help="what to compile for without a GPU")
    given = options.parse_args()
    cases = CASES
    if given.quick:
        kinds = {c.name.split()[0]: c for c in reversed(CASES)}
        cases = tuple(c for c in CASES if c in kinds.values())
    begun = time.perf_counter()
    here = torch.cuda.is_available()
    try:
        result = on_gpu(cases) if here else without_gpu(given.sm, cases)
    except LinexportError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    result["seconds"] = time.perf_counter() - begun
    measurement.write(given.json, result)
    return {"ok": 0, "wrong": 3, "no_gpu": EnvironmentProblemError.exit_code}[result["status"]]


if __name__ == "__main__":
    sys.exit(main())
