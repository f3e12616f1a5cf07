"""An artifact against its original with nothing of linexport in between.

``model.onnx`` in ONNX Runtime as a user without linexport opens it, its states as ``manifest.json``
names them, against the module in PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch


class Independent:
    """A model whose first input and output have tokens along axis 1, its states carried by hand."""

    def __init__(self, folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["status"] == "ok"
        self.states: list[dict[str, Any]] = manifest["states"]
        pasts = {s["past"] for s in self.states}
        self.inputs = [i["name"] for i in manifest["inputs"] if i["name"] not in pasts]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            folder / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.names = [o.name for o in self.session.get_outputs()]

    def pieces(self, x: np.ndarray, sizes: Iterable[int]) -> np.ndarray:
        """Return the first output of an input that is fed in pieces of these sizes."""
        return self.outputs(x, sizes)[0]

    def outputs(
        self,
        x: np.ndarray,
        sizes: Iterable[int],
        others: Iterable[np.ndarray] = (),
        later: Iterable[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Return the first output of all pieces along axis 1, and the others of the last one.

        ``others`` are the inputs without tokens, the same in all pieces, or ``later`` behind the
        first.
        """
        presents = {s["present"] for s in self.states}
        first, *rest = (n for n in self.names if n not in presents)
        past = {
            s["past"]: np.full(
                [len(x) if isinstance(d, str) else d for d in s["shape"]],
                s["initial"],
                s["dtype"],
            )
            for s in self.states
        }
        found, start, got = list[np.ndarray](), 0, dict[str, np.ndarray]()
        for size in sizes:
            pieces = (x[:, start : start + size], *(later if later and start else others))
            fed = dict(zip(self.inputs, pieces, strict=True)) | past
            got = dict(zip(self.names, self.session.run(None, fed), strict=True))
            past = {s["past"]: got[s["present"]] for s in self.states}
            found.append(got[first])
            start += size
        assert start == x.shape[1]
        return [np.concatenate(found, 1), *(got[n] for n in rest)]


def check_independently(
    folder: Path,
    module: torch.nn.Module,
    width: int,
    *,
    lengths: Iterable[int] = (1, 7, 130, 517),
    unit: int = 1,
    limit: float = 2e-5,
) -> None:
    """Compare whole sequences of several lengths, and one in random pieces and single steps.

    Args:
        folder: the artifact.
        module: takes (B, T, width); is run in float64 where that is possible.
        width: of the input.
        lengths: never traced, multiples of ``unit``.
        unit: the shortest piece.
        limit: difference allowed, of the largest output.
    """
    found, random = Independent(folder), np.random.default_rng(7)
    for length in lengths:
        x = random.standard_normal((3, length, width)).astype(np.float32)
        expected = _exact(module, torch.from_numpy(x))
        allowed = limit * np.abs(expected).max()
        ways = [[length]]
        if found.states:
            cuts = np.sort(random.choice(length // unit + 1, min(4, length // unit)))
            cuts = np.diff([0, *cuts, length // unit]) * unit
            ways += [[int(n) for n in cuts if n], [unit] * (length // unit)]
        for sizes in ways:
            error = np.abs(found.pieces(x, sizes) - expected).max()
            assert error <= allowed, f"{length} tokens in {len(sizes)} pieces: {error / allowed}"


def _exact(module: torch.nn.Module, x: torch.Tensor) -> np.ndarray:
    """Run a module in float64, or in float32 where its code names that."""
    with torch.no_grad():
        try:
            return module.double()(x.double()).double().numpy()
        except RuntimeError as error:
            if "scalar type" not in str(error):
                raise
            return module.float()(x).double().numpy()
        finally:
            module.float()
