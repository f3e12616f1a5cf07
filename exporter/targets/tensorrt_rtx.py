"""Target ``tensorrt-rtx``: engines of TensorRT-RTX, built on any machine for any of its GPUs."""

from __future__ import annotations

from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets.trt.target import target

TARGET = target(RTX, default_sms=(89, 120))
