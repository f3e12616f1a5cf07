"""A pack that times tiles of the attention kernels that the plans do not choose, on a GPU.

    python tools/gpu_tiles.py --sm 90 FILE variants.json       here, where no GPU is needed
    python FILE --tiles --json RESULT                          there

``variants.json`` maps names of cases (``tools/gpu/cases.py``) to lists of variants. A variant maps
names of functions of ``plugins/kernels/plans/tiles.py`` to the tile that they are to return,
``[chunk, block_k, block_v, warps, stages]``, and "resident" to the blocks that a multiprocessor is
counted on for. An empty one is the plan as it is. What does not compile is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

from gpu.case import Case
from gpu.cases import CASES
from gpu.described import described, plan
from gpu.run import VARIANTS, Variant
from gpu_check import begun

from linexport.errors import BuildError, LinexportError
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.description import MULTIPROCESSORS
from linexport.plugins.kernels.launch import Kernel, LaunchPlan
from linexport.plugins.kernels.plans import tiles
from linexport.plugins.kernels.plans.tile import Tile

BATCH, WORKERS = 8, 2
"""Kernels that one process compiles, and such processes at once."""


def planned(case: Case, variant: Variant, sm: int) -> LaunchPlan:
    """Return the plan of a case with a variant's tiles, of which only the route taken is left."""
    with ExitStack() as stack:
        for name, sizes in variant.items():
            if name != "resident":
                tile = Tile(*sizes)
                stack.enter_context(mock.patch.object(tiles, name, lambda *_, tile=tile: tile))
        found = plan(case, sm)
    found = replace(found, resident=variant.get("resident", found.resident))
    route = found.route(case.batch, case.length, MULTIPROCESSORS[sm])
    segmented = route if route is found.segmented else None
    return replace(found, single=route, segmented=segmented, decode=None)


def compiled(kernels: list[Kernel], sm: int) -> None:
    """Compile kernels into the cache, as far as they compile."""
    try:
        compile_kernels(kernels, sm)
    except BuildError as error:
        if len(kernels) == 1:
            print(f"Does not compile: {kernels[0].name}: {error}"[-300:], flush=True)
        else:
            for kernel in kernels:
                compiled([kernel], sm)


def main() -> int:
    """Write a pack."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("file", type=Path, help="the pack")
    options.add_argument("variants", type=Path, help="JSON: which tiles of which cases")
    options.add_argument("--sm", type=int, default=90, help="compute capability times ten")
    given = options.parse_args()
    wanted = json.loads(given.variants.read_text())
    cases = {case.name: case for case in CASES}
    if unknown := set(wanted) - set(cases):
        options.error(f"there is no case {sorted(unknown)}; there are {sorted(cases)}")
    pairs = [(cases[name], variant) for name, variants in wanted.items() for variant in variants]
    kernels: dict[str, Kernel] = {}
    for case, variant in pairs:
        kernels |= {kernel.name: kernel for kernel in planned(case, variant, given.sm).kernels()}
    print(f"{len(pairs)} variants, {len(kernels)} kernels", flush=True)
    every = list(kernels.values())
    batches = [every[i : i + BATCH] for i in range(0, len(every), BATCH)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda some: compiled(some, given.sm), batches))
    with begun(given.file) as pack:
        for number, (case, variant) in enumerate(pairs):
            tiles_of = planned(case, variant, given.sm)
            try:
                made = described(case, {given.sm: tiles_of})
            except LinexportError:
                continue
            if made.plans[given.sm] != tiles_of:
                print(f"Spills, left out: {case.name} {variant}", flush=True)
                continue
            content = {"case": case.name, "variant": variant, "node": made.attributes()}
            pack.writestr(f"{VARIANTS}/{number:04}.json", json.dumps(content))
    print(f"{given.file}: {given.file.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
