"""Options of ONNX Runtime's sessions, and models that are opened with another graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    from linexport.graph.external_data import ModelSource

EXTERNAL_WEIGHTS = "session.model_external_initializers_file_folder_path"
"""Setting of ONNX Runtime: where weights are of a model that is given as bytes."""

FLOAT_ACTIVATIONS, INTEGER_ACTIVATIONS = 1, 4
"""accuracy_level of MatMulNBits: activations remain in float32, or are rounded to int8, block by
block. Without the latter ONNX Runtime, up to 1.32, has no fast kernel: 8-bit weights are then
slower than float32."""

FLOAT_PRODUCTS = {"session.qdq_matmulnbits_accuracy_level": str(FLOAT_ACTIVATIONS)}
"""Activations as they are where ONNX Runtime joins a product with a DequantizeLinear."""

STRICT_NORMS = "enable_skip_layer_norm_strict_mode"
"""Option of the CUDA provider: norms of sums in half precision are summed in float32."""

LOGITS_TO_KEEP = "logits_to_keep"
"""Argument of a language model's call: of how many last tokens logits are computed; 0 for all."""

LOGITS_FROM = "logits_from"
"""Input of the graph that is run: the token from which on they are, negative: from the end."""

LOGITS_AT = "logits_at"
"""Input of an engine: the places in a call of the tokens that logits are computed of."""

Change = Callable[["onnx.ModelProto"], "onnx.ModelProto"]
"""Returns the graph to run, or the very one that it is given."""


def given(source: ModelSource, options: onnxruntime.SessionOptions) -> bytes | str:
    """Return a model as ONNX Runtime takes it.

    Args:
        source: a file, a serialised model, or a file that was read.
        options: of the session; they get the folder of external weights.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, Path):
        return str(source)
    options.add_session_config_entry(EXTERNAL_WEIGHTS, str(source.folder.resolve()))
    return source.content


def changed_graph(source: ModelSource, change: Change) -> tuple[ModelSource, onnx.ModelProto]:
    """Return a model with another graph, and that graph; weights in other files stay there.

    Args:
        source: see ``given``.
        change: of the graph.
    """
    import onnx

    from linexport.graph import external_data

    if isinstance(source, bytes):
        changed = change(onnx.load_from_string(source))
        return changed.SerializeToString(), changed
    graph = external_data.read_graph(source)
    changed = change(graph)
    if changed is graph:
        return source, graph
    folder = source.parent if isinstance(source, Path) else source.folder
    content = external_data.with_graph(source, changed)
    return external_data.ModelFile(content, folder), changed


def write_profile(options: onnxruntime.SessionOptions, folder: Path) -> None:
    """Have a session write a profile and its optimised graph to a folder."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", "weights"
    )


def session_options(
    threads: int, taking_turns: bool, low_memory: bool
) -> onnxruntime.SessionOptions:
    """Return ONNX Runtime's options; arguments are those of ``OrtSession``."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    # A plan, and the memory for it, would be kept for every length that is met.
    options.enable_mem_pattern = False
    if low_memory:
        # In the order of the graph: by default what the states need is computed last, and much
        # waits in memory for it. That order, and buffers that serve again, are faster.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.enable_mem_reuse = False
        # Packed weights are a copy in memory of what the system maps from the file.
        options.add_session_config_entry("session.disable_prepacking", "1")
    if taking_turns:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def giving_memory_back() -> onnxruntime.RunOptions:
    """Return options of a call that gives memory of ONNX Runtime's arena back at its end.

    Regions of the arena that hold a value, such as an output, are kept. Without an arena the system
    fills the pages of every value with zeros: a third of the time of a call of a thousand tokens.
    """
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
