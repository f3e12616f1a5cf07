"""A model whose step cannot be traced is traced without states, where its library was changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linexport import trace
from linexport.errors import LinexportError
from linexport.sources.loaded_model import LoadedModel, Source

SOURCE = Source(kind="module", location="here", sha256="", description="a test")


class Fixed(torch.nn.Module):
    """Trace only for the length of the example."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(x.shape[0], 5, 4)


class Free(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def loaded(module: torch.nn.Module) -> LoadedModel:
    dim = torch.export.Dim.DYNAMIC
    return LoadedModel(module, (torch.ones(2, 5, 4),), {}, ({1: dim},), SOURCE)


def test_the_model_without_states_is_traced_where_the_step_cannot_be() -> None:
    whole = loaded(Free())
    found, traced = trace.trace_or_whole(replace(loaded(Fixed()), whole=whole))
    assert found is whole
    assert traced.graph.graph.node[-1].op_type == "Mul"


def test_the_step_is_traced_where_it_can_be() -> None:
    step = replace(loaded(Free()), whole=loaded(Fixed()))
    assert trace.trace_or_whole(step)[0] is step


@pytest.mark.parametrize("whole", [None, loaded(Fixed())])
def test_an_error_names_what_the_library_lacks(whole: LoadedModel | None) -> None:
    lacking = "modeling_x has no scan."
    named = None if whole is None else replace(whole, unread=lacking)
    with pytest.raises(LinexportError, match="has no scan"):
        trace.trace_or_whole(replace(loaded(Fixed()), unread=lacking, whole=named))
