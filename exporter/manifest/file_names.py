"""Names of the files every artifact has."""

MANIFEST, MODEL, DATA, REPORT = "manifest.json", "model.onnx", "model.onnx.data", "report.html"
