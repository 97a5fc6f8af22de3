"""Every integer tensor that a public callable reads may be int32, int64 or uint32.

Arguments come from the calls of tests/test_wrong_kinds.py, so that new callables and arguments are
tried automatically, and promises from the docstrings.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparsemla import PagedCache, WindowState, plan_batch
from sparsemla_lab.testing.compare import assert_equal
from test_wrong_kinds import VALID, call, find

DTYPES = {"int32": torch.int32, "int64": torch.int64, "uint32": torch.uint32}


def entries(name: str) -> dict[str, str]:
    """The texts of a docstring's arguments."""
    doc = inspect.getdoc(find(name)) or ""
    section = doc.partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w[^:\n]*): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {each.split(" ")[0]: text for names, text in found for each in names.split(", ")}


def is_integer(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in DTYPES.values()


def read_integers() -> Iterator[tuple[str, str]]:
    for name, make in VALID.items():
        texts = entries(name)
        for argument, value in make().items():
            if is_integer(value) and "written" not in texts.get(argument, ""):
                yield name, argument


READ = list(read_integers())


def tensors_of(value: object) -> list[Tensor]:
    """All tensors of a result or an argument."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PagedCache):
        return [value.data.view(torch.uint8)]
    if isinstance(value, WindowState):
        return [value.rows]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def results(name: str, arguments: dict) -> list[Tensor]:
    """What a call returns, and what it leaves in its arguments, but for the integers."""
    if name == "sparsemla.share_lists":  # its lists have the dtype of the indices
        arguments.pop("out")
    returned = tensors_of(call(name, arguments))
    left = [
        each for value in arguments.values() if not is_integer(value) for each in tensors_of(value)
    ]
    return [tensor.long() if is_integer(tensor) else tensor for tensor in returned + left]


@functools.cache
def results_as_given(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    return results(name, VALID[name]())


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """-1 becomes 2^32 - 1, as a uint32 tensor of another library would have it."""
    return tensor.int().view(dtype) if dtype == torch.uint32 else tensor.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("name", "argument"), READ)
def test_integers_of_every_dtype(name, argument, dtype):
    torch.manual_seed(0)
    changed = VALID[name]()
    changed[argument] = as_dtype(changed[argument], dtype)
    got = results(name, changed)
    for ours, theirs in zip(got, results_as_given(name), strict=True):
        assert_equal("result", ours, theirs)


@pytest.mark.parametrize(("name", "argument"), READ)
def test_docstrings_promise_no_less(name, argument):
    text = entries(name).get(argument, "").partition("``")[0]
    promised = set(re.findall(r"u?int\d+", text))
    assert promised in (set(), set(DTYPES))


def test_integers_are_found():
    assert ("sparsemla.fused_rope_rmsnorm_quant", "slot_mapping") in READ
    assert ("sparsemla.pool_windows", "ring_ids") in READ
    assert ("sparsemla.plan_on_device", "page_table") in READ
    assert ("flash_mla.flash_mla_sparse_prefill", "indices") in READ
    assert ("sparsemla.visible_slots", "lengths") not in READ  # an output
    assert len(READ) > 60


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_lengths_of_requests(dtype):
    table = torch.tensor([[0], [1]]).to(dtype)
    plan = plan_batch([1, 1], [5, 2], table, page_size=8, workspace_rows=None)
    assert plan.clamp_topk(torch.tensor([3, 9]).to(dtype)).tolist() == [3, 2]
