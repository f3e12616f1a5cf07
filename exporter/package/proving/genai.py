"""Texts of a folder for onnxruntime-genai, by that library."""

from __future__ import annotations

import json

import numpy as np

from linexport.artifact.genai import CONFIG
from linexport.errors import EnvironmentProblemError
from linexport.package.destination import BatchPrompts, Packaging, WrittenTexts
from linexport.system.install import pip_install_here


def write_texts(job: Packaging, prompts: BatchPrompts) -> WrittenTexts:
    """See ``Destination.write_texts``; prompts are padded on the right."""
    try:
        import onnxruntime_genai as library
    except ImportError as error:
        raise EnvironmentProblemError(
            f"--prove runs the package in onnxruntime-genai, which cannot be imported here "
            f"({error}). Run: {pip_install_here('genai')}"
        ) from None
    padding = json.loads((job.folder / CONFIG).read_text())["model"]["pad_token_id"]
    longest = max(map(len, prompts.rows))
    ids = np.full((len(prompts.rows), longest), padding, np.int32)
    for row, prompt in zip(ids, prompts.rows, strict=True):
        row[: len(prompt)] = prompt
    model = library.Model(str(job.folder))
    parameters = library.GeneratorParams(model)
    parameters.set_search_options(
        max_length=longest + prompts.tokens, do_sample=False, batch_size=len(prompts.rows)
    )
    generator = library.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    texts = [[int(t) for t in generator.get_sequence(i)][longest:] for i in range(len(ids))]
    return WrittenTexts(f"onnxruntime-genai {library.__version__}", texts)
