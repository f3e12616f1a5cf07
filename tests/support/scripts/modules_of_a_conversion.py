"""Convert SOURCE for target ort, open, validate and measure it; print the modules imported."""

import json
import sys

import linexport

source, output = sys.argv[1:]
linexport.convert(source, output, lengths=(8,))
linexport.load(output)
linexport.validate(output, source=source)
linexport.bench(output, source=source, lengths=(8,))
print(json.dumps(sorted(sys.modules)))
