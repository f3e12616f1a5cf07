"""Plugins without an engine: fields, descriptions, what is launched, and the traps on the way."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.errors import EnvironmentProblemError, OpError, UnsupportedModelError, UsageError
from linexport.plugins.kernels.description import (
    MULTIPROCESSORS,
    Binary,
    Description,
    TensorDescription,
    compatible,
)
from linexport.plugins.kernels.launch import (
    Argument,
    Extent,
    Kernel,
    Launch,
    LaunchPlan,
    Route,
    Scratch,
)
from linexport.plugins.tensorrt import fields, flavour, launcher, modules, stub_library
from linexport.plugins.tensorrt.plugin import described, plugin_class, supports


def small() -> Description:
    """Two launches that share scratch memory; the second input means nothing."""
    first = Kernel("m.first", (Argument("x", "*fp16"), Argument("sums", "*fp32")), (), 4, 2)
    second = Kernel("m.second", (Argument("y", "*fp32"), Argument("length", "i32")), (), 8, 1)
    route = Route(
        (
            Launch(first, (Extent(3, ("batch",)), Extent(1, ("segments",)), Extent(1))),
            Launch(second, (Extent(1, ("chunks",)), Extent(1), Extent(1))),
        ),
        (Scratch("sums", "fp32", Extent(10, ("batch", "segments"))),),
    )
    plan = LaunchPlan(route, segmented=route, chunk=16, blocks=2, in_place=("y",))
    return Description(
        "Op",
        (
            TensorDescription("x", "fp16", ("batch", "length", 6)),
            None,
            TensorDescription("s", "fp32", ("batch", 2)),
        ),
        (TensorDescription("y", "fp32", ("batch", "length", 3)),),
        {80: plan, 120: plan},
        {
            sm: {
                first.name: Binary(b"\x7fELF\0\0", "first", 100),
                second.name: Binary(b"\0", "second", 70_000),
            }
            for sm in (80, 120)
        },
    )


def test_a_description_survives_its_attributes() -> None:
    again = Description.from_attributes(small().attributes())
    assert again == small()
    assert set(again.only(80).plans) == set(again.only(80).binaries) == {80}


def test_a_description_survives_a_plugins_fields_where_text_gains_a_zero_byte(rtx: Any) -> None:
    made = fields.encode(rtx, small().attributes())
    collection = made.collection
    assert Description.from_attributes(fields.decode(collection)) == small()
    padded = [
        SimpleNamespace(name=f.name, data=np.append(np.asarray(f.data), np.int8(0)))
        for f in collection
    ]
    assert Description.from_attributes(fields.decode(padded)) == small()


def test_integers_reach_a_plugin_as_int32_and_are_no_text(rtx: Any) -> None:
    field = rtx.PluginField("scale", np.array([3], np.int32), rtx.PluginFieldType.INT32)
    assert fields.decode([field]) == {}


def test_a_creator_declares_every_field_it_reads(rtx: Any) -> None:
    declared = {f.name for f in fields.declared(rtx).collection}
    assert declared == set(small().attributes())


@pytest.mark.parametrize("spoil", ["launch", "binaries", "format"])
def test_a_description_that_is_not_ours_is_refused(spoil: str) -> None:
    attributes = small().attributes()
    if spoil == "format":
        attributes["launch"] = attributes["launch"].replace('"format":2', '"format":7')
    else:
        del attributes[spoil]
    with pytest.raises(UnsupportedModelError, match="Convert the model again"):
        Description.from_attributes(attributes)


def test_sizes_come_from_the_shapes_and_a_wrong_shape_is_named() -> None:
    assert small().sizes([(2, 50, 6), (9,), (2, 2)]) == {"batch": 2, "length": 50}
    for shapes, name in (
        ([(2, 50, 7), (), (2, 2)], "x"),
        ([(2, 50), (), (2, 2)], "x"),
        ([(2, 50, 6), (), (3, 2)], "s"),
    ):
        with pytest.raises(OpError, match=f"Op: {name} has shape"):
            small().sizes(shapes)


@given(batch=st.integers(1, 12), length=st.integers(1, 5000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_scratch_set_aside_is_enough_for_every_smaller_call(
    batch: int, length: int, data: st.DataObject
) -> None:
    rows, tokens = data.draw(st.integers(1, batch)), data.draw(st.integers(1, length))
    for sm, plan in small().plans.items():
        needed = plan.scratch_bytes(rows, tokens, MULTIPROCESSORS[sm])
        assert needed <= small().scratch(sm, batch, length)


def test_the_best_binary_that_runs_is_chosen() -> None:
    known = (80, 87, 89, 90, 120)
    expected = {80: 80, 86: 80, 87: 87, 89: 89, 90: 90, 120: 120, 121: 120}
    assert {sm: compatible(sm, known) for sm in expected} == expected
    for sm, others in ((75, known), (100, known), (87, (80, 89)), (89, (87,)), (103, (100,))):
        with pytest.raises(UsageError, match=rf"compute capability {sm / 10:.1f}"):
            compatible(sm, others)


def test_types_and_formats_are_declared_tightly(rtx: Any) -> None:
    types, formats = rtx.DataType, rtx.TensorFormat
    able = [
        (position, kind.name)
        for position in range(4)
        for kind in (types.FLOAT, types.HALF, types.BF16, types.BOOL, types.INT32)
        if supports(rtx, small(), position, SimpleNamespace(type=kind, format=formats.LINEAR))
    ]
    # A stand-in is a copy of the first input.
    assert able == [(0, "HALF"), (1, "HALF"), (2, "FLOAT"), (3, "FLOAT")]
    other = SimpleNamespace(type=types.HALF, format=formats.CHW32)
    assert not supports(rtx, small(), 0, other)


class Driver:
    """Records what is asked of the CUDA driver."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.error = error

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            return (SimpleError(self.error), (name, arguments[-1]))

        return call

    def CUstream(self, handle: int) -> int:  # noqa: N802
        return handle

    def cuCtxGetCurrent(self) -> tuple[SimpleError, int]:  # noqa: N802
        return SimpleError(0), id(self)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


class SimpleError(int):
    name = "CUDA_ERROR_OF_THE_TEST"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (launcher, modules):
        monkeypatch.setattr(module, "driver", lambda: made)
    monkeypatch.setattr(launcher, "capability", lambda: 86)
    monkeypatch.setattr(launcher, "multiprocessors", lambda sm: 84)
    return made


def test_launches_in_order_with_scratch_and_two_null_pointers(driver: Driver) -> None:
    """What the driver is given, against the plan: batch 2, 50 tokens, 4 chunks of 16."""
    ready = launcher.Launcher(small())
    assert [a[0] for a in driver.named("cuModuleLoadData")] == [b"\x7fELF\0\0", b"\0"]
    assert [a[1:] for a in driver.named("cuFuncSetAttribute")] == [(8, 70_000)]
    ready.enqueue([(2, 50, 6), (1,), (2, 2)], [0x100, 0x200, 0x300, 0x400], 0x1000, 77)
    first, second = driver.named("cuLaunchKernel")
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    assert first[1:] == (6, 1, 1, 128, 1, 1, 100, 77, ((0x100, 0x1000, 0, 0), (pointer,) * 4), 0)
    values = ((0x400, 50, 0, 0), (pointer, int32, pointer, pointer))
    assert second[1:] == (4, 1, 1, 256, 1, 1, 70_000, 77, values, 0)


def test_kernels_are_loaded_when_a_node_is_attached_and_once_for_all_nodes(driver: Driver) -> None:
    first, second = launcher.Launcher(small()), launcher.Launcher(small())
    assert len(driver.named("cuModuleLoadData")) == 2 and len(driver.named("cuFuncLoad")) == 4
    first.close()
    assert driver.named("cuModuleUnload") == []
    del second  # as TensorRT drops a plugin: without a word
    gc.collect()
    assert len(driver.named("cuModuleUnload")) == 2


def test_a_smaller_gpu_gets_fewer_segments_and_a_larger_one_no_more_than_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found, counted in ((58, 58), (MULTIPROCESSORS[89] + 20, MULTIPROCESSORS[89])):
        monkeypatch.setattr(launcher, "_attribute", lambda name, found=found: found)
        assert launcher.multiprocessors(89) == counted


def test_a_driver_error_is_named(driver: Driver) -> None:
    ready = launcher.Launcher(small())
    driver.error = 1
    with pytest.raises(EnvironmentProblemError, match="CUDA_ERROR_OF_THE_TEST"):
        ready.enqueue([(1, 1, 6), (1,), (1, 2)], [0, 0, 0, 0], 0, 0)
    driver.error = 0


def test_a_gpu_without_kernels_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "capability", lambda: 90)
    with pytest.raises(UsageError, match=r"9\.0"):
        launcher.Launcher(small())


def test_the_launches_of_a_real_node_have_every_value_they_name(
    description: Callable[..., Description],
) -> None:
    for arguments in ({}, {"rule": "gated_delta", "normalize": False}):
        made = description(**arguments)
        for sm in made.plans:
            for length in (1, 7, 64, 5000):
                sizes = {"batch": 1, "length": length}
                addresses = [256 * i for i, _ in enumerate(made.tensors, 1)]
                count = MULTIPROCESSORS[sm]
                found = launcher.launches(made, sm, count, sizes, addresses, 1 << 20)
                assert found and {k.name for k in made.plans[sm].kernels()} <= set(
                    made.binaries[sm]
                )
                for (launch, grid), (values, types) in found:
                    assert len(values) == len(types) == len(launch.kernel.arguments) + 2
                    assert all(1 <= size <= 65535 or i == 0 for i, size in enumerate(grid))


def test_without_a_driver_a_launcher_says_so() -> None:
    if _has_driver():
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(EnvironmentProblemError, match="No NVIDIA driver"):
        launcher.Launcher(small())


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_a_plugin_is_its_own_clone_and_keeps_its_description(rtx: Any) -> None:
    made = plugin_class(rtx)(small())
    assert made.clone().description is made.description
    kept = made.get_fields_to_serialize()
    assert Description.from_attributes(fields.decode(kept)) == small()
    assert made.num_outputs == 1


def test_a_library_is_had_under_another_name() -> None:
    stub_library.provide("libunder_another_name.so", "libm.so.6")
    found = ctypes.CDLL("libunder_another_name.so")
    found.cos.restype, found.cos.argtypes = ctypes.c_double, [ctypes.c_double]
    assert found.cos(0.0) == 1.0


def test_a_library_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EnvironmentProblemError, match="libno_such_thing"):
        stub_library.provide("libsomething.so", "libno_such_thing.so.9")


def test_another_kind_of_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_library.platform, "machine", lambda: "riscv64")
    with pytest.raises(EnvironmentProblemError, match="riscv64"):
        stub_library.provide("libnever.so", "libm.so.6")


def test_a_missing_library_comes_with_its_install_command() -> None:
    missing = flavour.Flavour("x", "X", ("no_such_module",), "libx.so", 1, "pip install x")
    with pytest.raises(EnvironmentProblemError, match=r"X is not installed.*pip install x"):
        missing.load()
    assert not missing.installed


def test_a_description_is_read_once_for_all_nodes_that_are_alike() -> None:
    attributes = tuple(sorted(small().attributes().items()))
    assert (
        described(attributes) is described(tuple(attributes)) and described(attributes) == small()
    )
