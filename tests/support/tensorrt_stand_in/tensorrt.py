"""A stand-in for TensorRT's Python library, for run.py of a prepared folder on a stand-in driver.

An "engine" is the path of a prepared folder. Its ONNX model runs in ONNX Runtime, on the memory
that the stand-in for the driver gave out, which is the host's; profiles are those of trtexec.
"""

import ctypes
import enum
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime

DRIVER = ctypes.CDLL("libcuda.so.1")
DRIVER.fakeDriverHolds.argtypes = (ctypes.c_uint64, ctypes.c_size_t)


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class Logger:
    WARNING = 2

    def __init__(self, severity):
        self.severity = severity


def get_plugin_registry():
    return SimpleNamespace(load_library=lambda path: print("plugins", Path(path).name))


class Runtime:
    def __init__(self, logger):
        pass

    def deserialize_cuda_engine(self, content):
        folder = Path(content.decode())
        return Engine(folder) if folder.is_dir() else None


def shapes(arguments):
    """Smallest, usual and largest shapes by profile and input."""
    found = []
    for one in arguments:
        name, _, value = one.partition("=")
        if name == "--profile":
            found.append({})
        for side in ("min", "opt", "max"):
            if name == f"--{side}Shapes":
                for part in value.split(","):
                    tensor, _, sizes = part.rpartition(":")
                    shape = tuple(map(int, sizes.split("x")))
                    found[-1].setdefault(tensor, []).append(shape)
    return found


class Engine:
    def __init__(self, folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        graph = manifest["prepared"]["graph"] or "model.onnx"
        self.session = onnxruntime.InferenceSession(str(folder / graph))
        self.profiles = shapes(manifest["prepared"]["gpus"][0]["trtexec"])
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.outputs = {o.name: o for o in self.session.get_outputs()}
        self.names = [*self.inputs, *self.outputs]
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), len(self.profiles)

    def get_tensor_name(self, place):
        return self.names[place]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name, profile):
        return self.profiles[profile][name]

    def create_execution_context(self):
        return Context(self)


TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


class Context:
    def __init__(self, engine):
        self.engine, self.shapes, self.places = engine, {}, {}
        self.active_optimization_profile = 0

    def get_max_output_size(self, name):
        if not self.shapes.keys() >= self.engine.inputs.keys():
            return -1  # as TensorRT says of sizes that it cannot know yet
        largest = {n: s[2] for n, s in self.engine.profiles[0].items()}
        tokens = max(int(np.prod(s)) for s in largest.values())
        return tokens * 1024

    def set_optimization_profile_async(self, profile, stream):
        self.active_optimization_profile = profile

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.profiles[self.active_optimization_profile][name]
        assert all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True)), (name, shape)
        self.shapes[name] = tuple(shape)

    def set_tensor_address(self, name, address):
        self.places[name] = address

    def get_tensor_shape(self, name):
        return self.shapes[name]

    def execute_async_v3(self, stream):
        feeds = {}
        for name, one in self.engine.inputs.items():
            array = np.empty(self.shapes[name], TYPES[one.type])
            ctypes.memmove(array.ctypes.data, self.places[name], array.nbytes)
            feeds[name] = array
        values = self.engine.session.run(list(self.engine.outputs), feeds)
        for name, array in zip(self.engine.outputs, values, strict=True):
            self.shapes[name] = array.shape
            array = np.ascontiguousarray(array)
            assert DRIVER.fakeDriverHolds(self.places[name], array.nbytes), name
            ctypes.memmove(self.places[name], array.ctypes.data, array.nbytes)
        return True
