"""Make an adapter by peft, with random factors, and write the merged model's outputs.

FOLDER AUTO-CLASS ADAPTER SETTINGS(JSON) TOKENS(.npy) OUTPUTS(.npy)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

folder, auto, place, settings, tokens, outputs = sys.argv[1:]


def model() -> Any:
    return getattr(transformers, auto).from_pretrained(folder)


torch.manual_seed(1)
made = get_peft_model(model(), LoraConfig(**json.loads(settings)))
with torch.no_grad():
    for weight in made.parameters():
        if weight.requires_grad:
            weight.copy_(0.1 * torch.randn_like(weight))
made.save_pretrained(place)
merged = PeftModel.from_pretrained(model(), place).merge_and_unload().eval()
ids = torch.from_numpy(np.load(tokens))
with torch.no_grad():
    np.save(outputs, merged(input_ids=ids, attention_mask=torch.ones_like(ids))[0].numpy())
