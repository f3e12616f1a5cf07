"""linexport's plugins as classes of TensorRT's IPluginV3, for either of its Python libraries.

A class is made for the library at hand, since the base classes are the library's own. It runs any
op: what it needs is in its description. Types and formats are declared tightly, one combination
only: each further one is a variant of the layer that TensorRT plans and stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from linexport.errors import LinexportError
from linexport.plugins.kernels.contract import LAYER, NAMESPACE, VERSION
from linexport.plugins.kernels.description import Description
from linexport.plugins.ops.registry import all_ops
from linexport.plugins.tensorrt import fields
from linexport.plugins.tensorrt.flavour import Flavour
from linexport.plugins.tensorrt.launcher import Launcher

if TYPE_CHECKING:
    import tensorrt as trt

DATA_TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "i8": "BOOL"}
"""TensorRT's names of element types."""


@cache
def register(flavour: Flavour) -> tuple[Any, ...]:
    """Make the plugins known to a library; returns their creators, which it does not keep alive.

    Raises:
        EnvironmentProblemError: the library is not installed, or refuses them.
    """
    module = flavour.load()
    names = [*(op.name for op in all_ops().values() if op.kernels), LAYER]
    made = tuple(creator_class(module)(name) for name in names)
    for creator in made:
        module.get_plugin_registry().register_creator(creator, NAMESPACE)
    return made


@cache
def plugin_class(module: ModuleType) -> type:
    """The plugin for one library."""
    bases = (
        module.IPluginV3,
        module.IPluginV3OneCore,
        module.IPluginV3OneBuild,
        module.IPluginV3OneRuntime,
    )

    class LinexportPlugin(*bases):  # type: ignore[misc]
        """One node; ``failures`` holds what callbacks raised, which TensorRT does not pass on."""

        def __init__(self, description: Description) -> None:
            for base in bases:
                base.__init__(self)
            self.description = description
            self.launcher: Launcher | None = None
            self.plugin_name = description.op_type
            self.plugin_version, self.plugin_namespace = VERSION, NAMESPACE
            self.num_outputs = len(description.outputs)

        def get_capability_interface(self, kind: object) -> object:
            return self

        def clone(self) -> LinexportPlugin:
            copy = LinexportPlugin(self.description)
            copy.launcher = self.launcher
            return copy

        def get_output_data_types(self, types: Sequence[object]) -> list[object]:
            return [data_type(module, x.type) for x in self.description.outputs]

        def get_output_shapes(
            self,
            inputs: Sequence[trt.DimsExprs],
            shape_inputs: Sequence[trt.DimsExprs],
            builder: trt.IExprBuilder,
        ) -> list[object]:
            return output_shapes(module, self.description, inputs, builder)

        def supports_format_combination(
            self, position: int, io: Sequence[trt.DynamicPluginTensorDesc], inputs: int
        ) -> bool:
            return supports(module, self.description, position, io[position].desc)

        def configure_plugin(
            self,
            inputs: Sequence[trt.DynamicPluginTensorDesc],
            outputs: Sequence[trt.DynamicPluginTensorDesc],
        ) -> None:
            self.description.sizes([list(x.max) for x in inputs])

        def get_workspace_size(
            self,
            inputs: Sequence[trt.DynamicPluginTensorDesc],
            outputs: Sequence[trt.DynamicPluginTensorDesc],
        ) -> int:
            largest = self.description.sizes([list(x.max) for x in inputs])
            return max(self.description.scratch(sm, **largest) for sm in self.description.plans)

        def get_fields_to_serialize(self) -> object:
            self.kept = fields.encode(module, self.description.attributes())
            return self.kept.collection

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            pass

        def on_shape_change(
            self,
            inputs: Sequence[trt.DynamicPluginTensorDesc],
            outputs: Sequence[trt.DynamicPluginTensorDesc],
        ) -> None:
            self.description.sizes([list(x.dims) for x in inputs])

        def attach_to_context(self, context: object) -> LinexportPlugin:
            # Here, not at the first launch, which may be one that a graph captures.
            attached = self.clone()
            attached.launcher = Launcher(self.description)
            return attached

        def enqueue(
            self,
            input_desc: Sequence[trt.PluginTensorDesc],
            output_desc: Sequence[trt.PluginTensorDesc],
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            assert self.launcher is not None
            shapes = [list(x.dims) for x in input_desc]
            self.launcher.enqueue(shapes, [*inputs, *outputs], workspace, stream)

    return LinexportPlugin


@cache
def creator_class(module: ModuleType) -> type:
    """The creator for one library."""

    class LinexportCreator(module.IPluginCreatorV3One):  # type: ignore[name-defined]
        """Makes plugins of one op, from the attributes of a node or the fields of an engine."""

        def __init__(self, op_type: str) -> None:
            module.IPluginCreatorV3One.__init__(self)
            self.name = op_type
            self.plugin_version, self.plugin_namespace = VERSION, NAMESPACE
            self.declared = fields.declared(module)
            self.field_names = self.declared.collection
            self.failure: LinexportError | None = None

        def create_plugin(self, name: str, collection: object, phase: object) -> object:
            self.failure = None
            try:
                found = fields.decode(collection)
                return plugin_class(module)(described(tuple(sorted(found.items()))))
            except LinexportError as error:
                self.failure = error  # the parser only reports a missing plugin
                return None

    return LinexportCreator


@lru_cache(maxsize=128)
def described(attributes: tuple[tuple[str, str], ...]) -> Description:
    """Return the description of a node, read once for all nodes that are alike.

    Arguments and errors are those of ``Description.from_attributes``, as pairs.
    """
    return Description.from_attributes(dict(attributes))


def data_type(module: ModuleType, element: str) -> object:
    """TensorRT's data type of an element type."""
    return getattr(module.DataType, DATA_TYPES[element])


def supports(
    module: ModuleType, description: Description, position: int, found: trt.PluginTensorDesc
) -> bool:
    """The tensor at ``position``, inputs first, may have this type and format."""
    if found.format != module.TensorFormat.LINEAR:
        return False
    tensor = description.tensors[position]
    if tensor is None:  # a stand-in for nothing: what it is a copy of comes first
        first = description.inputs[0]
        assert first is not None
        tensor = first
    return bool(found.type == data_type(module, tensor.type))


def output_shapes(
    module: ModuleType,
    description: Description,
    inputs: Sequence[trt.DimsExprs],
    builder: trt.IExprBuilder,
) -> list[object]:
    """Symbolic shapes of the outputs: batch and length are taken from the inputs that have them."""
    known: dict[str, object] = {}
    for tensor, expression in zip(description.inputs, inputs, strict=True):
        for axis, size in enumerate(tensor.shape if tensor else ()):
            if isinstance(size, str):
                known.setdefault(size, expression[axis])
    found = []
    for tensor in description.outputs:
        shape = module.DimsExprs(len(tensor.shape))
        for axis, size in enumerate(tensor.shape):
            shape[axis] = known[size] if isinstance(size, str) else builder.constant(size)
        found.append(shape)
    return found
