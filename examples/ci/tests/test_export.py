"""The deployed artifact equals the model, streams, and has its attention fused."""

from pathlib import Path

import linexport


def test_export(tmp_path: Path) -> None:
    manifest = linexport.convert("my_project:build", tmp_path / "artifact", bench=False)
    assert manifest.status == "ok", f"see {tmp_path / 'artifact' / 'report.html'}"
    assert manifest.streaming and manifest.streaming.passed
    assert manifest.fused["LinearAttention"] == 1
