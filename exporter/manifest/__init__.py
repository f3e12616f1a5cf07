"""The manifest of an artifact: typed records, their JSON, its schema, and options."""

from linexport.manifest.file_names import DATA, LANGUAGE_FILES, MANIFEST, MODEL, REPORT
from linexport.manifest.folder import (
    describe_files,
    digest,
    has_manifest,
    is_artifact,
    parse,
    read,
)
from linexport.manifest.json_text import dumps
from linexport.manifest.options import ConvertOptions
from linexport.manifest.records import FORMAT, Manifest
from linexport.manifest.schema import from_json, to_json

__all__ = [
    "DATA",
    "FORMAT",
    "LANGUAGE_FILES",
    "MANIFEST",
    "MODEL",
    "REPORT",
    "ConvertOptions",
    "Manifest",
    "describe_files",
    "digest",
    "dumps",
    "from_json",
    "has_manifest",
    "is_artifact",
    "parse",
    "read",
    "to_json",
]
