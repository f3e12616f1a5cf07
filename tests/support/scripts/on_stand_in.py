"""Play a scenario with the engine of the artifact FOLDER on stand-ins for TensorRT and the driver.

on_stand_in.py FOLDER LIBRARY NAME: LIBRARY is tensorrt-10, tensorrt or tensorrt-rtx, NAME a
function of ``tests.support.device_scenarios``. Prints its result as JSON.
"""

import json
import sys
from pathlib import Path

from linexport import manifest as manifests
from linexport.plugins.tensorrt import flavour
from linexport.targets.trt import engine
from tests.support import device_scenarios, stand_in_engine

folder, library, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
made = stand_in_engine.library(folder, manifests.read(folder), library)
flavour._load = lambda found: made
engine.register = lambda found: ()
print(json.dumps(getattr(device_scenarios, name)(folder)))
