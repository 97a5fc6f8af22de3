"""The contract with SGLang, checked against the real package, without a GPU.

SGLang's own test kit builds its backend, memory pools, metadata and batches here; SGLang's Triton
kernels run in the interpreter. CI installs SGLang for this file alone: see `.ci/run`.
"""

import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import unittest
import warnings

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; .ci/run installs it", allow_module_level=True)

# SGLang needs torchvision, which imports without its CUDA library if this operator exists.
TORCHVISION = (
    "torchvision::nms",
    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
if not torch.cuda.is_available():
    torch.library.define(*TORCHVISION)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang
    from sglang.srt import plugins
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs
    from sglang.test.kits.attention_unittest.attention_methods.dsa_attention import (
        DSA_SPARSE_ATOL,
        DSA_SPARSE_FP8_ATOL,
        DSAAttentionCase,
        build_dsa_sparse_attention_fixture,
        expected_dsa_sparse_fixture_output,
        run_dsa_sparse_fixture_eager,
    )

    from sparsemla.backends.sglang import attention, register
    from sparsemla.backends.sglang.hooks import HOOKS, install, is_installed, signature

from torch._subclasses.fake_tensor import FakeTensorMode

from sparsemla import BF16_576, FP8_DS_MLA, PagedCache, reference
from sparsemla.testing.compare import SPARSE_DECODE_OUT, assert_close, assert_equal

pytestmark = pytest.mark.filterwarnings("default")

TOPK = 128


@pytest.fixture(autouse=True)
def plain_sglang(monkeypatch):
    """SGLang's functions and its registry of hooks, put back afterwards."""
    for hook in HOOKS:
        owner, name = hook.target.rsplit(".", 1)
        owner = pkgutil.resolve_name(owner)
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", "sparsemla")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    yield
    HookRegistry.reset()


def short(hook):
    return hook.target.rsplit(".", 1)[1]


# Registration.

CHILD = f"""
import logging, torch
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
torch.library.define(*{TORCHVISION})
{{}}
from sglang.srt.plugins import load_plugins
load_plugins()
from sparsemla.backends.sglang.hooks import HOOKS, is_installed
print(all(map(is_installed, HOOKS)))
"""


def new_process(prepare=""):
    """A process that loads SGLang's plugins as SGLang does."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD.format(prepare)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plugin_is_active_in_a_new_process():
    done = new_process()
    assert done.stdout.split() == ["True"], done.stderr
    (line,) = (line for line in done.stderr.splitlines() if " sparsemla replaces " in line)
    for hook in HOOKS:
        assert hook.target in line


BREAK = """
from sglang.srt.plugins.hook_registry import HookRegistry
apply = HookRegistry._apply_target
def broken(target, hooks):
    if target.endswith("_forward_fa3"):
        raise AttributeError(target)
    apply(target, hooks)
HookRegistry._apply_target = broken
"""


def test_a_hook_that_does_not_take_ends_the_process():
    """SGLang's registry logs the exception of this hook and goes on; the plugin must not."""
    done = new_process(BREAK)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Failed to apply hooks to" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("sparsemla: SGLang does not start: the hooks of sglang.")
    assert "_forward_fa3 did not take" in last


def test_the_plugin_can_be_registered_twice():
    register()
    functions = [pkgutil.resolve_name(hook.target) for hook in HOOKS]
    register()
    assert functions == [pkgutil.resolve_name(hook.target) for hook in HOOKS]
    assert all(map(is_installed, HOOKS))


@pytest.mark.parametrize("named", ["", "another", "sparsemla_other"])
def test_nothing_is_replaced_unless_the_plugin_is_named(monkeypatch, named):
    monkeypatch.setenv("SGLANG_PLUGINS", named)
    register()
    assert not any(map(is_installed, HOOKS))


@pytest.mark.parametrize("hook", HOOKS, ids=short)
def test_signatures_are_those_of_sglang(hook):
    assert signature(pkgutil.resolve_name(hook.target)) == hook.signature
    if hook.kind == HookType.REPLACE:
        assert signature(hook.function) == hook.signature


@pytest.mark.parametrize("hook", HOOKS, ids=short)
def test_another_signature_stops_the_start(monkeypatch, hook):
    def other(self, another_argument):
        """Of another version."""

    owner, name = hook.target.rsplit(".", 1)
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, other)
    with pytest.raises(SystemExit, match=rf"{name} must have signature .*another_argument"):
        register()


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(SystemExit) as caught:
        register()
    assert str(caught.value) == (
        "sparsemla: SGLang does not start: this plugin replaces methods of SGLang 0.5.23, got "
        "0.5.24; otherwise remove sparsemla from SGLANG_PLUGINS"
    )


def test_sglang_does_not_swallow_the_refusal(monkeypatch):
    """``load_plugins`` is the first thing that every process of SGLang does."""
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(SystemExit):
        plugins.load_plugins()


# Settings.

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": TOPK,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def arguments(tmp_path):
    """Makes SGLang's arguments and resolves and checks them, as its engine does."""

    def start(config=None, is_cuda=True, **changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        defaults = {"kv_cache_dtype": "fp8_e4m3", "device": "cuda", "skip_tokenizer_init": True}
        with override_platform(is_cuda=True):
            args = ServerArgs(model_path=str(tmp_path), **(defaults | changes))
            args.resolve_once()
        with override_platform(is_cuda=is_cuda):
            args.check_server_args()

    return start


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "auto"},
        {"dsa_prefill_backend": "flashmla_sparse"},
        {"dsa_prefill_backend": "flashmla_auto"},
        {"kv_cache_dtype": "bfloat16", "dsa_prefill_backend": "fa3"},
        {"dsa_topk_backend": "flashinfer"},
    ],
    ids=str,
)
def test_supported_settings_are_accepted(arguments, changes):
    install()
    arguments(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_cuda": False}, "the GPU must be one of NVIDIA"),
        ({"dsa_decode_backend": "trtllm"}, "--dsa-decode-backend must be one of .*, got trtllm"),
        ({"dsa_prefill_backend": "triton_sparse_mla"}, "--dsa-prefill-backend must be one of"),
        ({"dsa_prefill_backend": "flashmla_sparse_q8"}, "--dsa-prefill-backend must be one of"),
        ({"enable_hisparse": True, "disable_radix_cache": True}, "--enable-hisparse must be off"),
        ({"config": {"kv_lora_rank": 256}}, r"must be \(512, 64\), got \(256, 64\)"),
        (
            {"config": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}},
            "the model must have an indexer, got DeepseekV2ForCausalLM",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(arguments, changes, reason):
    install()
    with pytest.raises(ValueError, match=f"sparsemla: .*{reason}"):
        arguments(**changes)


def test_the_start_stops_if_another_plugin_replaces_the_backend(arguments):
    install()

    class Another(DeepseekSparseAttnBackend):
        """Has a method of its own."""

        def _forward_fa3(self):
            """Ours is not called."""

    target = HOOKS[0].target.rsplit(".", 1)[0]
    HookRegistry.register(target, Another, HookType.REPLACE)
    HookRegistry.apply_hooks()
    try:
        with pytest.raises(RuntimeError, match="_forward_fa3 did not take"):
            arguments()
    finally:
        dsa_backend.DeepseekSparseAttnBackend = DeepseekSparseAttnBackend


# Attention.

CASES = {
    "decode": {"forward_mode": ForwardMode.DECODE, "prefix_lens": (64, 128, 192)},
    "short decode": {"forward_mode": ForwardMode.DECODE, "prefix_lens": (0, 3)},
    "prefill": {
        "forward_mode": ForwardMode.EXTEND,
        "prefix_lens": (150, 0, 40),
        "extend_lens": (3, 70, 1),
    },
    "first prefill": {
        "forward_mode": ForwardMode.EXTEND,
        "prefix_lens": (0, 0),
        "extend_lens": (2, 140),
    },
    "speculative": {
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "prefix_lens": (100, 130),
        "extend_lens": (3, 3),
    },
}
# SGLang's choices of kernels, which are its methods, by cache.
METHODS = [
    ("fp8", "flashmla_kv", "flashmla_kv"),
    ("fp8", "flashmla_sparse", "flashmla_kv"),
    ("bf16", "flashmla_sparse", "fa3"),
    ("bf16", "fa3", "flashmla_sparse"),
    ("bf16", "flashmla_auto", "flashmla_kv"),
]


def fixture(name, cache="fp8", prefill="flashmla_kv", decode="flashmla_kv", num_heads=8):
    """SGLang's backend, memory pool and batch, and queries and keys of a layer."""
    return build_dsa_sparse_attention_fixture(
        unittest.TestCase(),
        DSAAttentionCase(
            name=name, backend="dsa", num_heads=num_heads, num_kv_heads=1, page_size=64, **CASES[name]
        ),
        device="cpu",
        fp8_kv_cache=cache == "fp8",
        dsa_prefill_backend=prefill,
        dsa_decode_backend=decode,
        index_pattern="strided",
    )


def selections(made):
    """Selected positions as SGLang's indexer returns them: slots, or rows of the contexts."""
    backend, batch = made.backend, made.forward_batch
    method = backend.get_topk_transform_method(batch.forward_mode)
    rows, starts, first = [], [], 0
    lens = [p + n for p, n in zip(made.case.prefix_lens, made.case.input_lens, strict=True)]
    for request, (count, length) in enumerate(zip(made.case.input_lens, lens, strict=True)):
        rows += [request] * count
        starts += [first] * count
        first += length
    positions, rows = made.topk_indices, torch.tensor(rows)
    if method == TopkTransformMethod.RAGGED:
        return torch.where(positions < 0, -1, positions + torch.tensor(starts)[:, None].int())
    table = backend.req_to_token[batch.req_pool_indices][rows]
    return torch.where(positions < 0, -1, table.gather(1, positions.clamp(0).long())).int()


@pytest.mark.parametrize("num_heads", [8, 16])
@pytest.mark.parametrize(("cache", "prefill", "decode"), METHODS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_agrees_with_sglangs_reference(
    monkeypatch, name, cache, prefill, decode, num_heads
):
    install()
    heads = set()
    for op in ("sparse_decode", "sparse_prefill"):
        call = getattr(attention, op)

        def seen(q, *args, call=call, **kwargs):
            heads.add(q.shape[-2])
            return call(q, *args, **kwargs)

        monkeypatch.setattr(attention, op, seen)
    made = fixture(name, cache, prefill, decode, num_heads)
    made.backend.init_forward_metadata(made.forward_batch)
    expected = expected_dsa_sparse_fixture_output(made)
    made.topk_indices = selections(made)
    found = run_dsa_sparse_fixture_eager(made, unittest.TestCase())
    bound = DSA_SPARSE_FP8_ATOL if cache == "fp8" else DSA_SPARSE_ATOL
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)
    assert heads == {num_heads}, "heads were padded"
