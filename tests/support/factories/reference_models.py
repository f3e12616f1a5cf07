"""The reference models at the sizes that engines are built for."""

import torch

from linexport import models


def make(name, **config):
    torch.manual_seed(0)
    model = models.build(name, {"num_heads": 2, **config}).eval()
    return model, model.example_inputs(2, 16, 0), model.dynamic_shapes()


def layer():
    return make("linear_attention_layer", head_dim=20)


def bidirectional():
    return make("linear_attention_layer", head_dim=20, causal=False)


def language_model():
    return make("language_model", dim=40, layers=2)


def digits():
    return make("digit_classifier", dim=40, layers=2)


def _rule(name):
    return make("language_model", dim=40, layers=1, update_rule=name, normalize=name == "linear")


def linear_rule():
    return _rule("linear")


def gated_rule():
    return _rule("gated")


def delta_rule():
    return _rule("delta")


def gated_delta():
    return _rule("gated_delta")


def taylor():
    return make("linear_attention_layer", head_dim=8, causal=False, feature_map="taylor2")


def random_features():
    options = {"features": 32}
    return make(
        "linear_attention_layer",
        head_dim=8,
        feature_map="favor+",
        feature_map_options=options,
        normalize=False,
    )


def stabilised():
    """Random features that are divided by their sum: by their exponents."""
    return make("linear_attention_layer", head_dim=8, feature_map="favor+")
