"""Layers of attention in vLLM, with the caches and the metadata that its runner makes for them."""

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
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
