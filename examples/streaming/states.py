"""Print an artifact's states for ``stream.cpp``: past, present, initial value, shape at batch 1.

python states.py ARTIFACT > states.txt
"""

import json
import sys
from pathlib import Path

for state in json.loads((Path(sys.argv[1]) / "manifest.json").read_text())["states"]:
    print(state["past"], state["present"], state["initial"], 1, *state["shape"][1:])
