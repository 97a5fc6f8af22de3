"""Every public callable gives the same bits whatever torch's global state, or refuses it clearly.

Arguments are those of ``test_wrong_kinds``, which has a row for every public callable, with random
numbers in place of zeros.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sparsemla import FP4_288, PagedCache, PlanBuffers, ops
from sparsemla.state import Table
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import run_op
from sparsemla_lab.verify.run import chosen_cases
from test_wrong_kinds import VALID, call, callables


class Subclass(Tensor):
    """A tensor of another class, as a library wraps its tensors."""


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")  # stands for a GPU
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def autocast(dtype):
    gpu = torch.cuda.is_available()
    with torch.autocast("cpu", dtype), torch.autocast("cuda", dtype, enabled=gpu):
        yield


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)  # which fills uninitialised memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def written_fp4_cache():
    cache = PagedCache.allocate(FP4_288, 2, 64)
    cache.write(torch.arange(128), Draw(0).normal(128, 512))
    return cache


def dense_branch_arguments():
    """A prefill over several pieces of a context, whose results are merged."""
    arguments = VALID["sparsemla.prefill_branch"]()
    layer = dataclasses.replace(arguments["layer"], attn_sink=None)
    return arguments | {
        "layer": layer,
        "topk_indices": None,
        "topk_lengths": None,
        "workspace_rows": 4,
    }


CASES = VALID | {
    "sparsemla.PagedCache.read, FP4": lambda: {
        "self": written_fp4_cache(),
        "slots": torch.arange(100),
    },
    "sparsemla.prefill_branch, dense": dense_branch_arguments,
}
"""Calls of public callables by name; after a comma, what is special about one."""

ON_THE_DEFAULT_DEVICE = {
    "sparsemla.PagedCache.allocate",
    "sparsemla.RowTable.allocate",
    "sparsemla.WindowState.allocate",
    "sparsemla.rope_frequencies",
}
"""Callables that make tensors from nothing, on torch's default device by their documentation."""

READS_VALUES = {
    "sparsemla.DecodeRunner",
    "sparsemla.DecodeRunner.run",
    "sparsemla.HostCache",
    "sparsemla.HostCache.allocate",
    "sparsemla.HostContext.rows",
    "sparsemla.HostContext.selected",
    "sparsemla.HostContext.start",
    "sparsemla.HotRows.forget",
    "sparsemla.HotRows.resolve",
    "sparsemla.HotRows.truncate",
    "sparsemla.PagedCache.gather",
    "sparsemla.PagedCache.read",
    "sparsemla.PagedCache.read, FP4",
    "sparsemla.PagedCache.write",
    "sparsemla.WindowState.copy",
    "sparsemla.plan_batch",
    "sparsemla.exchange_rows",  # its workspace is real
    "sparsemla.projection_weight",  # its layer is real
}
"""Callables that torch refuses in a fake mode, because they read or write values on the host."""

GIVES_MEMORY = {"sparsemla.HostCache.layer", "sparsemla.HotRows.layer"}
"""Callables that give tensors which their object has had since before the mode."""

STATES = {
    "another default device": default_device,
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "autocast to bfloat16": lambda: autocast(torch.bfloat16),
    "autocast to float16": lambda: autocast(torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic algorithms": deterministic,
}


def leaves(value):
    """The tensors and plain values in an argument or a result, in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, PlanBuffers):
        yield from leaves(vars(value))
    else:
        yield value


def arguments_of(name):
    """Valid arguments with values that a wrong dtype would change."""
    torch.manual_seed(0)
    arguments = CASES[name]()
    draw = Draw(0)
    for tensor in leaves(arguments):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.any():
            tensor.copy_(draw.normal(*tensor.shape))
    return arguments


def snapshot(value):
    """Dtypes and bytes, or values."""
    found = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            data = leaf.detach().as_subclass(Tensor).reshape(-1).cpu()
            found.append((data.dtype, leaf.shape, bytes(data.view(torch.uint8).numpy())))
        elif isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            found.append(leaf)
    return found


def run(name, arguments):
    return call(name.split(",")[0], arguments)


def outcome(name, arguments):
    """The results, and all arguments as the call leaves them."""
    return snapshot((run(name, dict(arguments)), arguments))


@functools.cache
def expected(name):
    return outcome(name, arguments_of(name))


def forget():
    """Empty every cache of the package, as in a new process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sparsemla."):
            for one in vars(module).values():
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()
                elif isinstance(one, Table):
                    one._made.clear()


def converted(value, change):
    """A copy of an argument with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PlanBuffers) or dataclasses.is_dataclass(value):
        copy = object.__new__(type(value))
        vars(copy).update({name: converted(part, change) for name, part in vars(value).items()})
        return copy
    if isinstance(value, dict):
        return {name: converted(part, change) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(converted(part, change) for part in value)
    return value


def test_every_public_callable_has_a_row():
    assert set(callables()) == set(VALID)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_same_bits(name, state):
    wanted, arguments = expected(name), arguments_of(name)
    forget()
    with STATES[state]():
        got = run(name, dict(arguments))
    if state == "another default device" and name in ON_THE_DEFAULT_DEVICE:
        assert {leaf.device.type for leaf in leaves(got) if isinstance(leaf, Tensor)} == {"meta"}
    else:
        assert snapshot((got, arguments)) == wanted
    assert outcome(name, arguments_of(name)) == wanted, "afterwards"


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_fake_mode_changes_nothing_afterwards(name):
    """Inside, a call gives fake tensors of the right shape, or needs values and is refused."""
    wanted, arguments = expected(name), arguments_of(name)
    forget()
    mode = FakeTensorMode()
    arguments = converted(arguments, mode.from_tensor)
    if name in READS_VALUES:
        with mode, pytest.raises((RuntimeError, AssertionError)):
            run(name, dict(arguments))
    else:
        with mode:
            got = run(name, dict(arguments))
        shapes = [leaf[:2] for leaf in wanted if isinstance(leaf, tuple)]
        found = [leaf for leaf in leaves((got, arguments)) if isinstance(leaf, Tensor)]
        assert [(leaf.dtype, leaf.shape) for leaf in found] == shapes
        assert name in GIVES_MEMORY or all(isinstance(leaf, FakeTensor) for leaf in found)
    assert outcome(name, arguments_of(name)) == wanted


@pytest.mark.parametrize("name", sorted(CASES))
def test_tensors_of_a_subclass_give_the_same_bits(name):
    wanted, arguments = expected(name), arguments_of(name)
    forget()
    arguments = converted(arguments, lambda tensor: tensor.as_subclass(Subclass))
    assert snapshot((run(name, dict(arguments)), arguments)) == wanted
    assert outcome(name, arguments_of(name)) == wanted, "afterwards"


@pytest.mark.parametrize("name", sorted(CASES))
def test_threads_do_not_disturb_each_other(name):
    """Two threads make a first call at the same time, one of them inside of autocast."""
    wanted, both = expected(name), [arguments_of(name) for _ in range(2)]
    forget()
    found, barrier = {}, threading.Barrier(2)

    def call_at_once(index):
        with torch.autocast("cpu", torch.bfloat16, enabled=index == 1):
            barrier.wait()
            found[index] = snapshot((run(name, dict(both[index])), both[index]))

    threads = [threading.Thread(target=call_at_once, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: wanted, 1: wanted}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("op", ops.__all__)
def test_same_bits_on_a_gpu(op):
    case = chosen_cases(op, "cuda", quick=True)[0]
    arguments = case.build(Draw(0, "cuda"))
    wanted = snapshot((run_op(op, arguments), arguments))
    for name, state in STATES.items():
        for _ in range(3):  # from its third time on, a call is repeated
            arguments = case.build(Draw(0, "cuda"))
            with state():
                got = run_op(op, arguments)
            assert snapshot((got, arguments)) == wanted, name
