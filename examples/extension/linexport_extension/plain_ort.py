"""Target ``plain-ort``: every op by its standard operators, run by ONNX Runtime."""

from linexport.targets.base import OrtSession, Target
from linexport.targets.lowering.choice import by_rules

TARGET = Target(name="plain-ort", candidates=by_rules({}), open=OrtSession)
