"""The program ``linexport``, which at its end writes the modules it imported to a file.

FILE [ARGUMENTS OF linexport]
"""

import atexit
import json
import sys
from pathlib import Path

from linexport.cli import main

place = Path(sys.argv.pop(1))
atexit.register(lambda: place.write_text(json.dumps(sorted(sys.modules))))
main()
