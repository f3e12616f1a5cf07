"""Names of the files that artifacts have."""

MANIFEST, MODEL, DATA, REPORT = "manifest.json", "model.onnx", "model.onnx.data", "report.html"

LANGUAGE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
"""Files that an artifact keeps of a Hugging Face folder: of its tokenizer, and how to generate.

Other systems are given no others: some load a library that a file of theirs names.
"""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that an artifact with a vision tower keeps as well: how images become its inputs."""

VISION, VISION_DATA = "vision.onnx", "vision.onnx.data"
MTP, MTP_DATA = "mtp.onnx", "mtp.onnx.data"
