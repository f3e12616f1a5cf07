"""``genai``: a folder that onnxruntime-genai runs; see ``linexport.artifact.genai``."""

from __future__ import annotations

import shutil

from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.proving import genai

REWIND = (
    "onnxruntime-genai 0.18 goes on with another text after rewind_to, where the snapshot was "
    "taken in mid-generation; right after the prompt it is exact."
)


def _write(job: Packaging) -> Packaged:
    from linexport.artifact.genai import write_genai

    written = write_genai(job.source, job.folder / "genai")
    for path in list(written.path.iterdir()):
        shutil.move(path, job.folder / path.name)
    written.path.rmdir()
    return Packaged(notes=(written.note, REWIND), even=not written.padded)


DESTINATION = Destination(
    "genai", "onnxruntime-genai 0.18, model type decoder.", _write, write_texts=genai.write_texts
)
