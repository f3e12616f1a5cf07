"""A factory that returns the Hugging Face language model of the current directory."""

import torch
from transformers import AutoModelForCausalLM


def make():
    model = AutoModelForCausalLM.from_pretrained(".")
    return model, (torch.ones(2, 6, dtype=torch.int64),)
