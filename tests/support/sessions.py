"""Sessions with a library of custom operators, here or in a Python of another architecture.

    PYTHON sessions.py LIBRARY

is the program there: it reads calls from its input and writes what they return. It needs NumPy and
ONNX Runtime only.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any, BinaryIO

import numpy as np
import onnxruntime as ort

THREADS = "linexport.threads"
Feeds = Mapping[str, np.ndarray]


def open_session(model: bytes, library: str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry(THREADS, str(threads))
    options.register_custom_ops_library(library)
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


def run_in_place(opened: ort.InferenceSession, feeds: Feeds) -> list[np.ndarray]:
    """All outputs, where each past_... of the inputs and its present_... are the same memory."""
    if isinstance(opened, RemoteSession):
        return opened.run_in_place(feeds)
    binding, kept = opened.io_binding(), {name: x.copy() for name, x in feeds.items()}
    for name, x in kept.items():
        binding.bind_cpu_input(name, x)
    for y in opened.get_outputs():
        past = kept.get(y.name.replace("present", "past"))
        if past is None:
            binding.bind_output(y.name, "cpu")
        else:
            binding.bind_output(y.name, "cpu", 0, past.dtype, past.shape, past.ctypes.data)
    opened.run_with_iobinding(binding)
    outputs: list[np.ndarray] = binding.copy_outputs_to_cpu()
    return outputs


class Remote:
    """The program in another Python."""

    def __init__(self, python: str, library: str) -> None:
        self.process = subprocess.Popen(
            [python, __file__, library], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def call(self, *request: Any) -> Any:
        """Return what the function returned there; an error there is one here."""
        assert self.process.stdin and self.process.stdout
        pickle.dump(request, self.process.stdin)
        self.process.stdin.flush()
        try:
            result = pickle.load(self.process.stdout)
        except EOFError:
            raise AssertionError(f"the other Python ended: {self.process.wait()}") from None
        if isinstance(result, Exception):
            raise result
        return result


@cache
def remote(python: str, library: str) -> Remote:
    return Remote(python, library)


class RemoteSession:
    """A session in another Python, which is closed there when this object is gone."""

    def __init__(self, python: str, library: str, model: bytes, threads: int) -> None:
        self.remote = remote(python, library)
        self.number = self.remote.call("open", model, threads)

    def run(self, names: list[str] | None, feeds: Feeds) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self.remote.call("run", self.number, names, feeds)
        return outputs

    def run_in_place(self, feeds: Feeds) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self.remote.call("run_in_place", self.number, feeds)
        return outputs

    def __del__(self) -> None:
        if hasattr(self, "number"):
            self.remote.call("close", self.number)


class Server:
    """What the program does with a call."""

    def __init__(self, library: str) -> None:
        self.library, self.sessions, self.numbers = library, dict[int, Any](), count()

    def open(self, model: bytes, threads: int) -> int:
        number = next(self.numbers)
        self.sessions[number] = open_session(model, self.library, threads)
        return number

    def run(self, number: int, names: list[str] | None, feeds: Feeds) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self.sessions[number].run(names, feeds)
        return outputs

    def run_in_place(self, number: int, feeds: Feeds) -> list[np.ndarray]:
        return run_in_place(self.sessions[number], feeds)

    def close(self, number: int) -> None:
        del self.sessions[number]

    def serve(self, requests: BinaryIO, results: BinaryIO) -> None:
        while True:
            try:
                name, *arguments = pickle.load(requests)
            except EOFError:
                return
            try:
                result = getattr(self, name)(*arguments)
            except Exception as error:
                result = RuntimeError(str(error))
            pickle.dump(result, results)
            results.flush()


if __name__ == "__main__":
    Server(sys.argv[1]).serve(sys.stdin.buffer, sys.stdout.buffer)
