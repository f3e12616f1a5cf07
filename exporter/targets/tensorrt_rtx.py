"""Target ``tensorrt-rtx``: engines of TensorRT-RTX, built on any machine, run on an RTX GPU."""

from __future__ import annotations

from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets.trt.target import target

TARGET = target(RTX, "TensorRT-RTX engines, built here for any of its GPUs.", (89, 120))
