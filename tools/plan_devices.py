"""Plans of public models' shapes on devices, for docs/devices.md.

    python tools/plan_devices.py docs/data/device_plans.json

Shapes are those of ``tools/real_shapes.py``, from their configurations alone: nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from real_shapes import SHAPES

from linexport import planning

MODELS = ("granite-4-h-350m", "mamba2-370m", "qwen3.5-0.8b", "lfm2-1.2b")
DEVICES = ("orin-nano", "agx-orin-64gb", "thor", "dgx-spark", "rtx3060-12gb", "rtx4090", "rtx5090")
CONTEXT = 8192


def plans(name: str) -> list[dict[str, object]]:
    """Return the figures of a shape on every device, for target tensorrt and weights in fp16."""
    shape, rows = SHAPES[name], []
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": shape.model_type, **shape.of()}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for device in DEVICES:
            found = planning.plan(folder, device=device, context=CONTEXT)
            engines = (row for row in found.rows if row.target == "tensorrt")
            row = next(row for row in engines if row.weights == "fp16")
            rows.append(
                {
                    "model": name,
                    "device": device,
                    "title": found.device,
                    "memory": row.memory_bytes,
                    "fits": row.fits,
                    "tokens_per_second": row.tokens_per_second,
                }
            )
    return rows


def main() -> None:
    """Write the plans as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    given = parser.parse_args()
    rows = [row for name in MODELS for row in plans(name)]
    given.json.write_text(json.dumps({"context": CONTEXT, "plans": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
