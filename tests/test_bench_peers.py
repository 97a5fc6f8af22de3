"""Peers that Triton compiles: the layouts that they get, and how they are loaded, without a GPU."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from sparsemla import BF16_576, FP8_584, INDEX_FP8, PagedCache, ops
from sparsemla_lab.bench import peers, run, timing, workloads
from sparsemla_lab.bench.ceilings import Ceilings
from sparsemla_lab.bench.peers import vllm_triton
from sparsemla_lab.bench.peers.base import Unavailable, stand_ins

CEILINGS = Ceilings(copy_gbps=3000, bf16_tflops=400, fp8_tflops=0, launch_us=5)
STAMP = run.Stamp("0123456789ab", "2026-01-02", {"torch": "2.11.0"})
TOPK = workloads.SelectTopk(5, 300, 32)


@pytest.fixture(scope="module")
def timer():
    return timing.Timer("cpu", budget_ms=0.001)


def test_sglang_sparse_mla_gets_the_inputs_in_its_layout(timer):
    def decode(nope, rope, rows, ids, scale, workspace):
        assert (nope.shape[-1], rope.shape[-1], rows.shape[1:]) == (512, 64, (1, 576))
        assert ids.shape[1] == 1
        workspace.append("kept")
        q = torch.cat([nope, rope], -1)
        return ops.sparse_prefill(q, rows[:, 0], ids[:, 0], softmax_scale=scale)[0][None]

    def prefill(nope, rope, rows, ids, scale):
        return decode(nope, rope, rows, ids, scale, [])

    peer = object.__new__(peers.SGLangSparseMLA)
    peer.decode, peer.prefill = decode, prefill
    for workload, name in (
        (workloads.SparseDecode(3, 1, 4, 200, 128, format=BF16_576), "decode"),
        (workloads.SparsePrefill(5, 300, 4, 576, 128), "fwd"),
    ):
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP, "sm_80")
        assert outcome.failures == outcome.refusals == {}
        assert [found.peer for found in outcome.rows] == [f"SGLang triton_sparse_mla_{name}"]
    outcome = run.run_one(
        workloads.SparsePrefill(5, 300, 128, 576, 128), [peer], timer, CEILINGS, STAMP
    )
    reason = outcome.refusals["SGLang triton_sparse_mla"]
    assert reason.startswith("a program takes all heads: for more than 64")
    assert reason.endswith("compile for minutes")
    assert outcome.rows[0].note == f"without SGLang triton_sparse_mla: {reason}"
    for workload, reason in (
        (workloads.SparsePrefill(5, 300, 4, 512, 128), "takes rows of 512 and 64 dims"),
        (workloads.SparseDecode(3, 1, 4, 200, 128), "takes a bfloat16 cache"),
        (workloads.SparseDecode(3, 2, 4, 200, 128, format=BF16_576), "one token a request"),
        (workloads.WindowedDecode(3, 1, 4, 128, 128), "has no such op"),
        (TOPK, "has no such op"),
    ):
        assert reason in peer.supports(workload)


def test_sglang_v4_gets_the_inputs_in_its_layout(timer):
    def decode(q, cache, ids, lens, sink, dims, scale, extra, extra_ids, extra_lens):
        assert cache.shape[1:] == extra.shape[1:] == (64, 1, 584)
        assert dims == 512
        more = {"topk_lengths": lens, "attn_sink": sink, "extra_topk_lengths": extra_lens}
        caches = [PagedCache(each[:, :, 0], FP8_584) for each in (cache, extra)]
        more |= {"extra_cache": caches[1], "extra_topk_indices": extra_ids}
        return ops.sparse_decode(q, caches[0], ids, softmax_scale=scale, **more)

    peer = object.__new__(peers.SGLangTritonV4)
    peer.decode = decode
    workload = workloads.WindowedDecode(3, 1, 4, 128, 128, extra_context=200, extra_topk=64)
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP, "sm_80")
    assert outcome.failures == outcome.refusals == {}
    assert [found.peer for found in outcome.rows] == ["SGLang flash_mla_sm120_triton"]
    assert peer.supports(workloads.SparseDecode(3, 1, 4, 200, 128)) == "has no such op"


def test_sglang_candidate_blocks_get_the_inputs_in_its_layout(timer):
    def select(scores, lens, topk_blocks, size):
        blocks = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        blocks = blocks.unflatten(1, (-1, size)).amax(2)
        blocks.scatter_(1, (lens.long() - 1) // size, torch.inf)
        best = blocks.topk(min(topk_blocks, blocks.shape[1]))
        return best.indices.int().masked_fill(best.values == -torch.inf, -1)

    def among(scores, lens, blocks, topk, size):
        assert lens.dtype == torch.int32
        columns = torch.arange(scores.shape[1])
        listed = ((columns // size)[:, None, None] == blocks).any(2).T
        best = scores.masked_fill(~listed, -torch.inf).topk(min(topk, scores.shape[1]))
        return best.indices.masked_fill(best.values == -torch.inf, -1)

    peer = object.__new__(peers.SGLangCandidateBlocks)
    peer.module = SimpleNamespace(select_candidate_block_ids=select, topk_among_blocks=among)
    for workload in (
        workloads.IndexerTopkBlocks(2, 3, 70, 16, heads=32, topk_blocks=4),
        workloads.IndexerTopkOfBlocks(3, 1, 130, 16, heads=32, num_blocks=4),
    ):
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP, "sm_80")
        assert outcome.failures == outcome.refusals == {}
        assert [found.peer for found in outcome.rows] == ["SGLang candidate_blocks"]
    assert peer.supports(workloads.IndexerTopk(2, 3, 70, 16)) == "has no such op"


def test_sglang_candidate_blocks_are_loaded_without_sglang(tmp_path, monkeypatch):
    folder = tmp_path / "sglang/kernels/ops/attention/dsv4"
    folder.mkdir(parents=True)
    (folder / "candidate_blocks.py").write_text(
        "from sglang.kernels.jit.utils import cache_once, is_arch_support_pdl\n"
        "from .candidate_table import CANDIDATE_BLOCK_SIZE\n"
        "from .topk import plan_topk_v2\nfrom .utils import make_name\n",
        encoding="utf-8",
    )
    imported = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "sglang", imported)
    assert peers.SGLangCandidateBlocks([tmp_path]).module.CANDIDATE_BLOCK_SIZE == 8
    assert sys.modules["sglang"] is imported
    with pytest.raises(Unavailable, match=r"candidate_blocks.py is not there"):
        peers.SGLangCandidateBlocks([folder])


def test_vllm_scores_get_the_inputs_in_its_layout(timer):
    def scores(q, cache, weights, lens, table, max_seq_len):
        assert (cache.shape[1:], weights.dim()) == ((64, 1, 132), 2)
        found = ops.indexer_scores_paged(
            q,
            weights.view(q.shape[:3]),
            PagedCache(cache[:, :, 0], INDEX_FP8),
            table,
            lens,
            max_seq_len=max_seq_len,
        )
        return found.flatten(0, 1)

    peer = object.__new__(peers.VLLMTriton)
    peer.scores = scores
    workload = workloads.IndexerScoresPaged(3, 2, 70)
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP, "sm_80")
    assert outcome.failures == outcome.refusals == {}
    assert [found.peer for found in outcome.rows] == ["vLLM rocm_fp8_paged_mqa_logits_triton"]
    assert peer.supports(workloads.IndexerScores(9, 40)) == "has no such op"


def test_attention_gym_gets_the_inputs_in_its_layout(timer):
    def attend(q, local, rows, ids, sink, starts, key_starts, window, shared, *, scale):
        assert q.is_contiguous()
        assert local.shape == (1, 1, *q.shape[2:])
        assert (starts, key_starts, window, shared) == (None, None, 0, True)
        assert sink.tolist() == [-torch.inf] * q.shape[1]
        out, lse = ops.sparse_prefill(
            q[0].transpose(0, 1).contiguous(), rows[0, 0], ids[0], softmax_scale=scale
        )
        return out.transpose(0, 1)[None], lse

    def select(q, keys, weights, topk, causal, ratio):
        assert (causal, ratio, q.shape[:2]) == (True, 1, keys.shape[:2])
        assert q.dtype == keys.dtype == weights.dtype == torch.bfloat16
        scores = torch.einsum("thd,sd->ths", q[0].float(), keys[0].float()).relu()
        scores = (scores * weights[0, :, :, None]).sum(1)
        unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
        best, ids = scores.masked_fill(unseen, -torch.inf).topk(topk)
        return ids.masked_fill(best == -torch.inf, -1).int()[None]

    peer = object.__new__(peers.AttentionGym)
    peer.attend, peer.select = attend, select
    for workload, name, note in (
        (workloads.SparsePrefill(5, 300, 16, 512, 128), "gather_attn", "its kernel for Blackwell"),
        (workloads.IndexerTopk(1, 70, 70, 16), "lightning_indexer", "bfloat16 MMA"),
    ):
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP, "sm_80")
        assert outcome.failures == outcome.refusals == {}
        assert [(found.peer, found.note) for found in outcome.rows] == [(f"attn-gym {name}", note)]
    for workload, reason in (
        (workloads.SparsePrefill(5, 300, 16, 576, 128), "rows of 512 dims"),
        (workloads.SparsePrefill(5, 300, 8, 512, 128), "16 to 128 heads"),
        (workloads.IndexerTopk(1, 9, 70, 16), "all tokens of a sequence"),
        (workloads.IndexerTopk(1, 70, 70, 8, ratio=4), "all tokens of a sequence"),
        (workloads.IndexerTopk(2, 70, 70, 8), "all tokens of a sequence"),
        (TOPK, "has no such op"),
    ):
        assert reason in peer.supports(workload)


def write(root, contents):
    for name, text in contents.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_sglang_is_loaded_without_sglang(tmp_path, monkeypatch):
    folder = "sglang/kernels/ops/attention"
    write(
        tmp_path,
        {
            "sglang/__init__": "raise RuntimeError",
            f"{folder}/dsa/__init__": "raise RuntimeError",
            f"{folder}/dsa/triton_sparse_mla": """
from sglang.kernels.ops.attention.metadata import q8kv8_topk_length_from_indices
from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz
from sglang.srt.utils import get_device_core_count, is_gfx95_supported
triton_sparse_mla_fwd = is_fp8_fnuz(), is_gfx95_supported(), get_device_core_count
""",
            f"{folder}/dsa/triton_sparse_mla_decode": """
from sglang.kernels.ops.attention.dsa.triton_sparse_mla import triton_sparse_mla_fwd
triton_sparse_mla_decode_splitk = triton_sparse_mla_fwd[:2]
""",
            f"{folder}/flash_mla_sm120_triton": "flash_mla_sparse_decode_triton = 3",
        },
    )
    imported = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "sglang", imported)
    before = set(sys.modules)
    peer = peers.SGLangSparseMLA([tmp_path])
    assert peer.prefill[:2] == peer.decode == (False, False)
    card = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert peer.prefill[2](0) == 108  # asks torch, which an older GPU's stand-in answers
    assert peers.SGLangTritonV4([tmp_path]).decode == 3
    assert sys.modules["sglang"] is imported
    assert set(sys.modules) - before == {"flash_mla_sm120_triton"}
    del sys.modules["flash_mla_sm120_triton"]
    for kind, missing in (
        (peers.SGLangSparseMLA, "triton_sparse_mla_decode.py is not there"),
        (peers.SGLangTritonV4, "flash_mla_sm120_triton.py is not there"),
    ):
        with pytest.raises(Unavailable, match=missing):
            kind([tmp_path / "sglang"])


def test_vllm_scores_are_loaded_without_vllm(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    write(
        tmp_path,
        {
            "vllm/__init__": "raise RuntimeError",
            vllm_triton.VLLMTriton.FILE.removesuffix(".py"): """
import vllm.envs as envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm.v1.attention.ops.common import pack_seq_triton, unpack_seq_triton
from vllm.v1.worker.workspace import current_workspace_manager
init_logger(__name__)
direct_register_custom_op(op_name="op")
@eager_break_during_capture
def other(layer: LayerNameType) -> None: ...
def rocm_fp8_paged_mqa_logits_triton(*sizes):
    return current_platform.is_rocm(), *current_workspace_manager().get_simultaneous(*sizes)
""",
        },
    )
    before = set(sys.modules)
    peer = peers.VLLMTriton([tmp_path])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    is_rocm, room = peer.scores(((2, 3), torch.float32))
    assert (is_rocm, room.shape, room.dtype) == (False, (2, 3), torch.float32)
    assert {name for name in set(sys.modules) - before if "vllm" in name} == set()
    sys.modules.pop("rocm_aiter_mla_sparse", None)
    with pytest.raises(Unavailable, match=r"rocm_aiter_mla_sparse\.py is not there"):
        peers.VLLMTriton([tmp_path / "vllm"])


def test_attention_gym_is_loaded_without_its_package(tmp_path):
    kernels = "attn_gym/sparse/gather_attn/impl/triton"
    write(
        tmp_path,
        {
            "attn_gym/__init__": "raise RuntimeError",
            "attn_gym/sparse/__init__": "",
            "attn_gym/sparse/gather_attn/__init__": "",
            "attn_gym/sparse/gather_attn/impl/__init__": "",
            f"{kernels}/__init__": "from .forward import attend as gather_attn",
            f"{kernels}/forward": """
def can_use_shared_kv_schedule(query, rows, local, window): return False
def attend(): return can_use_shared_kv_schedule(None, None, None, 0)
""",
            "attn_gym/sparse/indexer/__init__": "",
            "attn_gym/sparse/indexer/impl/__init__": "",
            "attn_gym/sparse/indexer/impl/triton": "launch = 5",
        },
    )
    try:
        peer = peers.AttentionGym([tmp_path])
        assert (peer.attend(), peer.select) == (True, 5)
        found, _ = peers.find_peers(tmp_path)  # a second search, in the same process
        assert any(isinstance(each, peers.AttentionGym) for each in found)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "attn_gym"]:
            del sys.modules[name]
    with pytest.raises(Unavailable, match="attn_gym/sparse is not there"):
        peers.AttentionGym([tmp_path / "attn_gym"])


def test_stand_ins_end_with_their_block():
    def use():
        with stand_ins("absent", {"absent.a.b": {"c": 1}}):
            assert importlib.import_module("absent.a.b").c == 1
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        use()
    assert not any(name.startswith("absent") for name in sys.modules)


@pytest.mark.parametrize("name", ["vllm", "sgl_flash_mla", "sglang", "attn_gym"])
def test_files_of_installed_packages_are_searched(name, tmp_path, monkeypatch):
    searched = []

    class Searching:
        name = "searching"

        def __init__(self, directories):
            searched.extend(directories)

    (tmp_path / f"{name}-1.2.3.dist-info").mkdir()
    metadata = tmp_path / f"{name}-1.2.3.dist-info" / "METADATA"
    metadata.write_text(f"Name: {name}\nVersion: 1.2.3\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / name)])
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda each: spec if each == name else None
    )
    monkeypatch.setattr(peers, "PEERS", (Searching,))
    peers.find_peers()
    assert searched == [tmp_path]
    assert peers.versions(tmp_path)[name] == "1.2.3"
