"""Layers of attention in vLLM, with the caches and the metadata that its runner makes for them."""

import math
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import rms_norm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.forward_context import set_forward_context
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.worker.block_table import get_block_table_width
    from vllm.v1.worker.gpu.attn_utils import (
        build_attn_metadata,
        init_attn_backend,
        init_kv_cache,
    )
    from vllm.v1.worker.workspace import current_workspace_manager


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
