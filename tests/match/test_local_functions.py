"""Attention inside a local function of a file is found as if it were written out."""

from __future__ import annotations

from pathlib import Path

from onnx import parser

from linexport import passes
from linexport.sources import load_model
from linexport.trace import trace

TEXT = """<ir_version: 8, opset_import: ["" : 18, "acme" : 1]>
    g (float[B, T, 2, 8] q, float[B, T, 2, 8] k, float[B, T, 2, 8] v) => (float[B, T, 2, 8] y)
    { one = acme.Attend(q, k, v)
      other = acme.Attend(k, q, v)
      y = Mul(one, other) }
    <domain: "acme", opset_import: ["" : 18, "acme" : 1]>
    Features (x) => (y) { y = Relu(x) }
    <domain: "acme", opset_import: ["" : 18, "acme" : 1]>
    Attend (q, k, v) => (y) {
        qf = acme.Features(q)
        kf = acme.Features(k)
        qh = Transpose <perm = [0, 2, 1, 3]> (qf)
        kh = Transpose <perm = [0, 2, 3, 1]> (kf)
        vh = Transpose <perm = [0, 2, 1, 3]> (v)
        scores = MatMul(qh, kh)
        kept = Trilu <upper = 0> (scores)
        read = MatMul(kept, vh)
        y = Transpose <perm = [0, 2, 1, 3]> (read)
    }"""


def test_every_call_is_fused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(parser.parse_model(TEXT).SerializeToString())
    matches = passes.rewrite(trace(load_model(path)).model).findings.matches
    assert [(m.causal, m.query_map, m.key_map) for m in matches] == [(True, "relu", "relu")] * 2
