"""Write the vectors of sentence-transformers: FOLDER TEXTS(JSON) PROMPT OUTPUT(.npy)."""

from __future__ import annotations

import json
import sys

import numpy as np
from sentence_transformers import SentenceTransformer

folder, texts, prompt, output = sys.argv[1:]
model = SentenceTransformer(folder, device="cpu")
np.save(output, model.encode(json.loads(texts), prompt_name=prompt))
