"""Convert SOURCE for target ort, open and measure it; print the modules imported."""

import json
import sys

import linexport

source, output = sys.argv[1:]
linexport.convert(source, output, bench=False)
linexport.load(output)
linexport.bench(output, source=source, lengths=(8,))
print(json.dumps(sorted(sys.modules)))
