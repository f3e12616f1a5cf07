"""Target ``tensorrt``: engines of TensorRT, built where the GPU is or prepared for it elsewhere."""

from __future__ import annotations

from linexport.plugins.tensorrt.flavour import TENSORRT
from linexport.targets.trt.target import target

TARGET = target(TENSORRT, default_sms=())
