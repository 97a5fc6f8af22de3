"""Layers of attention in vLLM, with the caches and the metadata that its runner makes for them."""

import ast
import json
import math
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import envs
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.forward_context import set_forward_context
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.worker import workspace
    from vllm.v1.worker.block_table import get_block_table_width
    from vllm.v1.worker.gpu.attn_utils import (
        build_attn_metadata,
        init_attn_backend,
        init_kv_cache,
    )
    from vllm.v1.worker.workspace import current_workspace_manager, init_workspace_manager

    from sparsemla.backends.vllm import conversions, windows

from sparsemla import INDEX_FP8, group_o_a_proj, reference
from sparsemla.kernels.attention import schedule


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory):
    init_workspace_manager(torch.device("cpu"))
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    if model_parallel_is_initialized():  # by the tests of another file
        return
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        initialize_model_parallel(1, 1)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class CachedLayers:
    """The caches of layers that were made with vLLM's configuration, and the metadata of steps.

    Pages hold NaN until they are written.

    Args:
        config: vLLM's.
        draw: randomness, of the order of pages.
        specs: what each layer asks for, by its name.
        num_bytes: memory for all caches.
    """

    def __init__(self, config, draw, specs, num_bytes):
        self.config, device = config, torch.device("cpu")
        self.parts = config.compilation_config.static_forward_context
        layouts = get_supported_kv_cache_layouts(
            {self.parts[name].get_attn_backend() for name in specs}
        )
        resolve_kv_cache_layout(config, [[each.name for each in layouts]], specs.values())
        groups = get_global_kv_cache_groups(config, [specs])
        self.caches = get_kv_cache_configs(config, [specs], [num_bytes], groups)[0]
        self.groups, support, sizes = init_attn_backend(self.caches, config, device)
        self.support = support.min_cg_support.name
        flat = [group for several in self.groups for group in several]
        self.builders = {
            name: group.get_metadata_builder(0) for group in flat for name in group.layer_names
        }
        init_kv_cache(self.parts, self.caches, device, sizes, config, attn_groups=flat)
        for part in self.parts.values():
            part.kv_cache.view(torch.uint8).fill_(255)
        self.free = draw.permutation(self.caches.num_blocks - 1).add(1).tolist()  # 0 is no page
        self.tables = [{} for _ in self.caches.kv_cache_groups]

    def row(self, number, request, max_tokens):
        """Of a request in a group: what it caches, the most blocks, and the row of its table."""
        group = self.caches.kv_cache_groups[number]
        spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
        most = spec.max_num_blocks_per_req(self.config, max_tokens)
        width = get_block_table_width(most, spec.block_size)
        row = self.tables[number].setdefault(request, torch.zeros(width).int())
        return spec, most, row

    def metadata(self, counts, ends, positions, tables, slots, **options):
        """Metadata of a step, whose tokens after the requests' are padding of one more request.

        Options are those of vLLM's metadata.
        """
        padded = [0] * (len(positions) > sum(counts))
        offsets = torch.tensor([0, *counts, *padded]).cumsum(0).int()
        lengths = torch.tensor([*ends, *padded]).int()
        return build_attn_metadata(
            self.groups,
            len(lengths),
            len(positions),
            offsets,
            offsets,
            max(counts),
            lengths,
            max(ends),
            tables,
            slots,
            self.caches,
            seq_lens_cpu_upper_bound=lengths,
            positions=positions,
            **options,
        )


def positions_of(chunks, padding):
    """Positions of chunks ``(request, first, inputs)``; padding's are those of an earlier step."""
    ranges = [torch.arange(first, first + len(inputs)) for _, first, inputs in chunks]
    return torch.cat([*ranges, torch.arange(3, 3 + padding)])


class CompressedLayers(CachedLayers):
    """Layers of DeepSeek-V4 or V4.1, with the caches and the metadata that vLLM makes for them.

    Pages behind a window are given up as vLLM does it, and hold NaN again.

    Args:
        config: vLLM's.
        draw: randomness, of pages.
        layers: made with the configuration; they take positions and inputs.
    """

    def __init__(self, config, draw, layers):
        self.draw, self.layers = draw, layers
        parts = config.compilation_config.static_forward_context
        specs = {name: part.get_kv_cache_spec(config) for name, part in parts.items()}
        specs = {name: spec for name, spec in specs.items() if spec is not None}
        super().__init__(config, draw, specs, 16 << 20)

    def allocate(self, request, first, last):
        """Pages for positions ``first .. last`` of a request in every group."""
        for number, group in enumerate(self.caches.kv_cache_groups):
            spec, most, row = self.row(number, request, self.config.model_config.max_model_len)
            window = getattr(spec, "sliding_window", None)
            behind = 0 if window is None else first - window + 1
            for block in range(min(-(-last // spec.block_size), most)):
                if (block + 1) * spec.block_size <= behind:
                    if row[block]:
                        for name in group.layer_names:
                            self.parts[name].kv_cache[row[block]].view(torch.uint8).fill_(255)
                        self.free.append(int(row[block]))
                    row[block] = 0
                elif not row[block]:
                    row[block] = self.free.pop(0)

    def step(self, chunks, padding=0, dummy=False, **options):
        """Serve chunks ``(request, first, inputs [n, hidden])``, decodes first.

        A dummy step has the pages of real requests, but no slots. Options are those of vLLM's
        metadata.

        Returns:
            The outputs of each layer ``[n, hidden]`` for each chunk.
        """
        ends = [first + len(inputs) for _, first, inputs in chunks]
        for (request, first, _), end in zip(chunks, ends, strict=True):
            self.allocate(request, first, end)
        counts = [len(inputs) for *_, inputs in chunks]
        positions = positions_of(chunks, padding)
        tables, slots = [], []
        for group, table in zip(self.caches.kv_cache_groups, self.tables, strict=True):
            size = group.kv_cache_spec.block_size
            rows = [table[request] for request, *_ in chunks]
            tables.append(torch.stack(rows + [torch.full_like(rows[0], -1)] * bool(padding)))
            owner = torch.repeat_interleave(torch.tensor(counts))
            real = positions[: len(owner)]
            blocks = (real // size).clamp(max=tables[-1].shape[1] - 1)  # a ring has one
            found = tables[-1][owner, blocks].long() * size + real % size
            slots.append(torch.cat([found, found.new_full((padding,), -1)]))
            if dummy:
                slots[-1].fill_(-1)
        most = self.config.scheduler_config.max_num_batched_tokens
        buffer = torch.full((len(slots), most), -1)  # rows of vLLM's buffer are aligned
        buffer[:, : len(positions)] = torch.stack(slots)
        metadata = self.metadata(
            counts, ends, positions, tables, buffer[:, : len(positions)], **options
        )
        x = torch.cat([inputs for *_, inputs in chunks])
        x = torch.cat([x, x.new_full((padding, x.shape[1]), math.nan)])
        manager = current_workspace_manager()
        manager.lock()  # as vLLM does it once graphs are captured
        try:
            with set_forward_context(metadata, self.config), torch.no_grad():
                results = [layer(positions, x) for layer in self.layers]
        finally:
            manager.unlock()
        return [result[: sum(counts)].split(counts) for result in results]

    def serve(self, x, steps):
        """The outputs ``[layer][request]`` of each layer for whole requests.

        Args:
            x: inputs ``[n, hidden]`` of each request.
            steps: of each the requests and their tokens, decodes first.
        """
        served = [0] * len(x)
        found = [[[] for _ in x] for _ in self.layers]
        for number, step in enumerate(steps):
            chunks = [(i, served[i], x[i][served[i] : served[i] + n]) for i, n in step]
            if number % 2:  # other tokens first, as if they were rejected drafts
                self.step([(i, first, rows.flip(0) + 1) for i, first, rows in chunks])
            padding = 3 if all(n == 1 for _, n in step) else 0
            for results, outputs in zip(found, self.step(chunks, padding), strict=True):
                for (i, *_), output in zip(chunks, outputs, strict=True):
                    results[i].append(output)
            for i, n in step:
                served[i] += n
        assert served == list(map(len, x))
        return [[torch.cat(parts) for parts in results] for results in found]

    def serve_after(self, prefix, own_state=False):
        """Serve two requests with the same prefix, whose pages the second takes from the first.

        Args:
            prefix: its tokens, whole blocks of every group.
            own_state: the second request begins with an open window of its own.

        Returns:
            The inputs ``[prefix + n, hidden]`` of each request, and the outputs
            ``[layer][request]`` of each layer behind the prefix.
        """
        x = [self.draw.normal(prefix + length, HIDDEN).bfloat16() for length in (9, 12)]
        x[1][:prefix] = x[0][:prefix]
        for first in (0, prefix // 2):
            self.step([(0, first, x[0][first : first + prefix // 2])])
        steps = [self.step([(0, prefix, x[0][prefix:])])]
        for group, table in zip(self.caches.kv_cache_groups, self.tables, strict=True):
            table[1] = table[0].clone()
            table[1][prefix // group.kv_cache_spec.block_size :] = 0  # pages of its own
            if own_state and "state_cache" in group.layer_names[0]:
                table[1].zero_()
        for first, last in ((0, 10), (10, 11), (11, 12)):
            steps.append(self.step([(1, prefix + first, x[1][prefix + first : prefix + last])]))
        outputs = [[each for (each,) in layer] for layer in zip(*steps, strict=True)]
        return x, [(first, torch.cat(rest)) for first, *rest in outputs]


def randomise(layers, draw):
    """Give all weights of layers values that keep the size of what they multiply."""
    for name, weight in layers.named_parameters():
        scale = 1 if weight.dim() == 1 or name.endswith("ape") else weight.shape[-1] ** -0.5
        weight.copy_(draw.normal(*weight.shape) * scale + name.endswith("norm.weight"))


@contextmanager
def like_a_gpu(attention):
    """What vLLM's classes need of a platform with streams, on the CPU.

    Args:
        attention: vLLM's module of the layers.
    """
    product = torch.mm

    def mm(a, b, out_dtype=None):
        return product(a, b) if out_dtype is None else product(a.to(out_dtype), b.to(out_dtype))

    def norm(qr, kv, q_weight, kv_weight, eps):
        rows = ((qr, q_weight), (kv, kv_weight))
        return [rms_norm(x.float(), x.shape[-1:], w.float(), eps).to(x.dtype) for x, w in rows]

    with pytest.MonkeyPatch.context() as change:
        change.setattr(attention, "fused_q_kv_rmsnorm", norm)  # interpreted, it takes a minute
        change.setattr(type(current_platform), "device_type", "cpu")
        change.setattr(torch.cuda, "Event", SimpleNamespace)
        change.setattr(torch.cuda, "Stream", SimpleNamespace)
        change.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        change.setattr(torch.accelerator, "empty_cache", lambda: None)
        change.setattr(torch, "mm", mm)
        yield


# What tests of DeepSeek-V4 and V4.1 share.

MAX_TOKENS, TOPK, HIDDEN = 160, 8, 64
SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": TOPK,
    "sliding_window": 128,
    "vocab_size": 256,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 256,
}


def configured(folder, fields):
    """vLLM's configuration of a model, with a ``config.json`` in a folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024
    )


def engine_config(model_config, backend="CUSTOM", **cache):
    """vLLM's configuration of an engine with that model and such a cache."""
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(cache_dtype="auto", **cache),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=8,
            max_model_len=model_config.max_model_len,
            is_encoder_decoder=False,
        ),
        attention_config=AttentionConfig(backend=backend),
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
    return config


class Experts(nn.Module):
    """In the place of the mixture of experts, which needs a platform."""

    use_native_mega_moe, n_redundant_experts = False, 0

    def __init__(self, *args, **kwargs):
        super().__init__()


def index_queries(layer, x):
    """A layer's index queries and head weights for a whole request, by the reference."""
    qr = layer._split_qkv_and_norm(layer.fused_wqa_wkv(x)[0])[0]
    return reference.prepare_index_queries(
        layer.indexer.wq_b(qr)[0].view(len(x), 16, 128),
        layer.indexer.weights_proj(x)[0],
        layer.rotary_emb.cos_sin_cache,
        positions=torch.arange(len(x)),
        format=INDEX_FP8,
        interleaved=True,
        rope_first=False,
    )


def attended(layer, q, raw, window, **extra):
    """A layer's outputs ``[T, hidden]`` for a whole request, by the reference from its queries."""
    out, *_ = reference.sparse_prefill(
        q, raw, window, softmax_scale=512**-0.5, attn_sink=layer.attn_sink, **extra
    )
    groups = reference.project_groups(
        out.bfloat16(),
        group_o_a_proj(layer.wo_a.weight, num_groups=2),
        cos_sin_cache=layer.rotary_emb.cos_sin_cache,
        positions=torch.arange(len(q)),
    )
    return layer.wo_b(groups.flatten(1).bfloat16())


def imported_from_vllm(file):
    """What a module imports from vLLM, as in rows of ``surface``."""
    return {
        f"{node.module}:{each.name}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for each in node.names
    }


def put_back(layer, part):
    """Give a part of a layer the class that vLLM has for it; the class's module."""
    *path, name = part.split(".")
    owner = layer.get_submodule(".".join(path))
    vllms = type(getattr(owner, name)).__mro__[1]
    getattr(owner, name).__class__ = vllms
    return vllms.__module__


REFUSED = [
    ("cache_config", "cache_dtype", "bfloat16", "must be one of auto, fp8, fp8_ds_mla; got bf"),
    ("module", "dsa_indexer_uses_fp4", lambda config: True, "indexer_kv_dtype must be fp8"),
    ("attention_config", "hisparse_config", object(), "HiSparse must be off"),
    ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size"),
    ("parallel_config", "prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
    ("model", "head_dim", 576, r"head_dim and qk_rope_head_dim must be 512 and 64, got .*576"),
    ("model", "index_head_dim", 64, "index_head_dim must be 128, got 64"),
    ("envs", "VLLM_BATCH_INVARIANT", True, "batch invariance is not supported"),
    ("gpu", "get_device_capability", DeviceCapability(7, 5), "must be sm_80 or newer"),
    ("gpu", "is_rocm", True, "on NVIDIA GPUs only"),
]
"""Where a value is, its name, the value, and part of why it is refused."""


def set_value(monkeypatch, config, module, where, name, value):
    """Set a value that ``module.refuse`` must find."""
    if where == "gpu":
        monkeypatch.setattr(type(current_platform), name, classmethod(lambda *args, **_: value))
        return
    model = config.model_config.hf_config
    places = {"model": model, "engine": config, "envs": envs, "module": module}
    monkeypatch.setattr(places.get(where) or getattr(config, where), name, value, raising=False)


@pytest.fixture
def convert_from():
    """A function that makes prefills of so many tokens or more convert their rows.

    It returns the conversions that layers then make.
    """

    def convert(min_tokens):
        def converts_first(format, device, num_heads, num_tokens, num_keys, num_rows):
            return num_tokens >= min_tokens

        change.setattr(schedule, "converts_first", converts_first)
        change.setattr(workspace, "_manager", None)
        init_workspace_manager(torch.device("cpu"))
        conversions.reserved_rows.cache_clear()
        made, attend = [], windows.attend

        def spied(conversion, *arguments, **options):
            made.append(conversion)
            attend(conversion, *arguments, **options)

        change.setattr(windows, "attend", spied)
        return made

    with pytest.MonkeyPatch.context() as change:
        yield convert
    conversions.reserved_rows.cache_clear()
