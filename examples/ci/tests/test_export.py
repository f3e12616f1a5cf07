"""The deployed artifact equals the model, streams, and has its attention fused."""

from pathlib import Path

import linexport


def test_export(tmp_path: Path) -> None:
    record = linexport.convert("my_project:build", tmp_path / "artifact", bench=False)
    assert record["status"] == "ok", f"see {tmp_path / 'artifact' / 'report.html'}"
    assert record["streaming"]["passed"]
    assert record["fused"]["LinearAttention"] == 1
