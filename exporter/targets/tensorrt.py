"""Target ``tensorrt``: engines of TensorRT, built on the machine of the GPU they run on."""

from __future__ import annotations

from linexport.plugins.tensorrt.flavour import TENSORRT
from linexport.targets.trt.target import target

TARGET = target(TENSORRT, default_sms=())
