"""``sgl_kernel`` of ``examples/sglang_without_sgl_kernel``, beside plain formulas."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "sglang_without_sgl_kernel"


@pytest.fixture
def sgl_kernel(monkeypatch):
    """The stand-in, imported as SGLang imports ``sgl_kernel``; forgotten afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield importlib.import_module("sgl_kernel")
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def normalised(x, weight, eps):
    return torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), eps)


@pytest.mark.parametrize("given", [False, True], ids=["returned", "out"])
def test_rmsnorm(sgl_kernel, given):
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(96).bfloat16()
    out = torch.empty_like(x) if given else None
    found = sgl_kernel.rmsnorm(x, weight, 1e-5, out=out)
    torch.testing.assert_close(found, normalised(x, weight, 1e-5).bfloat16())
    assert found is out or not given


def test_fused_add_rmsnorm(sgl_kernel):
    x, residual, weight = torch.randn(3, 5, 96).bfloat16()
    weight = weight[0]
    total = x.double() + residual.double()
    assert sgl_kernel.fused_add_rmsnorm(x, residual, weight, 1e-5) is None
    torch.testing.assert_close(residual, total.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(x, normalised(total, weight, 1e-5).bfloat16())


@pytest.mark.parametrize("given", [False, True], ids=["returned", "out"])
def test_silu_and_mul(sgl_kernel, given):
    x = torch.randn(5, 2 * 12).bfloat16()
    out = torch.empty(5, 12).bfloat16() if given else None
    found = sgl_kernel.silu_and_mul(x, out)
    gate, up = x[:, :12].double(), x[:, 12:].double()
    torch.testing.assert_close(found, (gate * gate.sigmoid() * up).bfloat16())
    assert found is out or not given


def test_moe_align_block_size(sgl_kernel):
    """Four tokens of two experts each, one of them absent; expert 1 has no token."""
    topk_ids = torch.tensor([[2, 0], [0, -1], [2, 3], [2, 0]]).int()
    sorted_ids, experts = torch.full((16,), 77).int(), torch.full((8,), 77).int()
    num, scratch = torch.zeros(1).int(), torch.zeros(6).int()
    sgl_kernel.moe_align_block_size(topk_ids, 5, 2, sorted_ids, experts, num, scratch, True)
    assert num.tolist() == [12]
    assert experts[:6].tolist() == [-1, 0, 0, 2, 2, 3]
    assert sorted_ids.tolist() == [3, 8, 1, 2, 7, 8, 0, 4, 6, 8, 5, 8, 8, 8, 8, 8]


def test_moe_sum_reduce(sgl_kernel):
    x, out = torch.randn(5, 3, 16).bfloat16(), torch.empty(5, 16).bfloat16()
    sgl_kernel.moe_sum_reduce(x, out, 2.5)
    torch.testing.assert_close(out, (2.5 * x.double().sum(1)).bfloat16())


@pytest.mark.parametrize("topk", [4, 24])
def test_fast_topk_transform_fused(sgl_kernel, topk):
    """Two requests of 3 and 2 rows, whose keys follow each other in the columns."""
    lengths, starts = torch.tensor([7, 8, 9, 1, 2]).int(), torch.tensor([0, 0, 0, 9, 9]).int()
    score, table = torch.randn(5, 12), torch.randperm(40).int().view(2, 20)
    found = sgl_kernel.fast_topk_transform_fused(
        score, lengths, table, torch.tensor([0, 3, 5]).int(), topk, row_starts=starts
    )
    assert found.shape == (5, topk)
    assert found.dtype == torch.int32
    for row, request in enumerate([0, 0, 0, 1, 1]):
        start, length = int(starts[row]), int(lengths[row])
        best = score[row, start : start + length].topk(min(topk, length)).indices
        slots = found[row][found[row] >= 0]
        assert sorted(slots.tolist()) == sorted(table[request][best].tolist())


def test_fast_topk_transform_fused_of_decodes(sgl_kernel):
    """A row of each request, no starts, and fewer slots than columns."""
    score, table = torch.randn(3, 8), torch.arange(24).int().view(3, 8)
    score = torch.cat([score, torch.full((3, 30), 9.0)], 1)  # not of a request
    found = sgl_kernel.fast_topk_transform_fused(
        score, torch.tensor([8, 3, 1]).int(), table, torch.arange(4).int(), 4
    )
    score = score[:, :8]
    assert found[0].sort().values.tolist() == score[0].topk(4).indices.sort().values.tolist()
    assert found[1].sort().values.tolist() == [-1, 8, 9, 10]
    assert found[2].tolist() == [16, -1, -1, -1]


def test_weak_ref_tensor_keeps_the_address(sgl_kernel):
    x = torch.randn(3)
    assert sgl_kernel.weak_ref_tensor(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("rmsnorm", [(2, 8), (8,)]),
        ("fused_add_rmsnorm", [(2, 8), (2, 8), (8,)]),
        ("silu_and_mul", [(2, 8)]),
        ("moe_sum_reduce", [(2, 3, 8), (2, 8), ()]),
    ],
)
def test_other_dtypes_are_refused(sgl_kernel, name, shapes):
    tensors = [torch.ones(shape, dtype=torch.float16) for shape in shapes]
    match = rf"sgl_kernel\.{name} of this stand-in takes bfloat16, got torch\.float16"
    with pytest.raises(NotImplementedError, match=match):
        getattr(sgl_kernel, name)(*tensors)
    assert all((tensor == 1).all() for tensor in tensors)


@pytest.mark.parametrize(
    ("module", "name"),
    [("sgl_kernel", "top_k_renorm_prob"), ("sgl_kernel.flash_attn", "flash_attn_varlen_func")],
)
def test_any_other_function_is_refused_by_name_when_it_is_called(sgl_kernel, module, name):
    function = getattr(importlib.import_module(module), name)
    with pytest.raises(NotImplementedError, match=rf"^{module}\.{name} is not in this stand-in"):
        function(torch.ones(2))


def test_scalar_types_are_absent(sgl_kernel):
    """SGLang asks for them in a ``try``, and does without."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sgl_kernel.scalar_type")
