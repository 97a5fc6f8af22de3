"""Mutants, wrong kernels and layers that the checks must find.

A mutant replaces one piece of text in a copy of the package and runs a check on the copy: tests, in
Triton's interpreter, or ``verify`` on a GPU. It is found if the check fails, or hangs on a GPU. A
mutant that does not compile proves nothing and counts as broken.

    python tests/mutants.py                       # on the CPU
    python tests/mutants.py --hopper --json FILE  # Hopper's kernels, on a GPU or interpreted
    python tests/mutants.py --ampere --json FILE  # those with Ampere's instructions, the same
    python tests/mutants.py --vllm                # layers in vLLM, which must be installed
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src/sparsemla"


@dataclass(frozen=True)
class Mutant:
    """One wrong kernel, or a wrong layer in vLLM.

    Args:
        name: the error.
        file: path below ``folder``.
        old: text that occurs once in the file.
        new: its replacement.
        check: arguments of pytest, or of ``verify``.
        gpu: the GPU whose kernels ``verify`` runs to tell, on a GPU or in the interpreter; empty
            if tests tell.
        folder: path below ``sparsemla``.
    """

    name: str
    file: str
    old: str
    new: str
    check: str
    gpu: str = ""
    folder: str = "kernels"


def portable(name: str, file: str, old: str, new: str, check: str) -> Mutant:
    """A mutant that tests find on a CPU, in an interpreter."""
    return Mutant(name, file, old, new, check)


def hopper(name: str, file: str, old: str, new: str, *ops: str) -> Mutant:
    """A mutant that quick cases of these ops find with Hopper's kernels."""
    return Mutant(name, file, old, new, " ".join(f"--op {op}" for op in ops), gpu="sm_90")


def ampere(name: str, file: str, old: str, new: str, *ops: str) -> Mutant:
    """A mutant that quick cases of these ops find with the kernels for sm_80."""
    return Mutant(name, file, old, new, " ".join(f"--op {op}" for op in ops), gpu="sm_80")


def vllm(name: str, file: str, old: str, new: str, check: str) -> Mutant:
    """A wrong layer in vLLM that tests find on a CPU, where vLLM is installed."""
    return Mutant(name, file, old, new, f"tests/test_vllm_{check}", folder="backends/vllm")


AMPERE_ATTENTION = "attention/sm80.py"
ONE_TILE = "attention/sm80_one_tile.py"

# Few tests each, as the interpreter is slow.
DECODE = "tests/test_tiers.py -k portable_kernels and sparse_decode-fp8_584"
CLIMBING = "tests/test_sm80_attention.py -k rise_by and sm_89"
TILES_OF_KEYS = "tests/test_tiers.py -k portable_kernels and sparse_decode-1024"
OWN_LENGTHS = "tests/test_tiers.py -k portable_kernels and sparse_decode-2 and each and extra"
CAUSAL = "tests/test_tiers.py -k portable_kernels and dense_decode-3 and causal and fp8_584"
DENSE = "tests/test_tiers.py -k portable_kernels and dense_decode-2 and 16"
MERGE = "tests/test_tiers.py -k portable_kernels and merge_states-100"
STREAMS = "tests/test_tiers.py -k portable_kernels and sparse_prefill-extra and pages"
PREFILL = "tests/test_tiers.py -k portable_kernels and dense_prefill-context"
RAGGED = "tests/test_tiers.py -k portable_kernels and indexer_scores-5 and strided"
PAGED = "tests/test_tiers.py -k portable_kernels and indexer_scores_paged- and pages"
BLOCKS = "tests/test_tiers.py -k portable_kernels and indexer_topk_blocks-blocks"
OF_BLOCKS = "tests/test_tiers.py -k portable_kernels and indexer_topk_of_blocks-9"
NAN = "tests/test_triton_topk.py -k adversarial_candidates and NaN"
TIES = "tests/test_triton_topk.py -k strided_values or (test_merge and five)"
PARTS = "tests/test_tiers.py -k portable_kernels and project_heads-5"
WRITES = "tests/test_tiers.py -k portable_kernels and fused_rope_rmsnorm_quant-fp8_584"
WRITES_FP4 = "tests/test_tiers.py -k portable_kernels and fused_rope_rmsnorm_quant-fp4_288"
TIES_FP4 = "tests/test_triton_quant.py -k nan_large_values_and_ties and fp4_288"
DECODE_FP4 = "tests/test_tiers.py -k portable_kernels and sparse_decode-fp4_288"
KEYS_FP4 = "tests/test_tiers.py -k portable_kernels and indexer_scores_paged-index_mxfp4"
QUERIES = "tests/test_tiers.py -k portable_kernels and fused_rope_rmsnorm_quant-whole"
GROUPS = "tests/test_triton_projection.py -k test_groups and num_parts and 3 and block1"
GROUP_STEPS = "tests/test_triton_projection.py -k test_groups and 192 and block1"
GROUPS_ACROSS = "tests/test_triton_projection.py -k test_groups and num_parts and 3 and block2"
POOL = "tests/test_tiers.py -k portable_kernels and pool_windows-ratio and overlap and index_fp8"
LONG_POOL = "tests/test_triton_pool.py -k long_steps and 21"
GRADIENTS = "tests/test_tiers.py -k portable_kernels and short and 200"
SHARED_GRADIENTS = "tests/test_tiers.py -k portable_kernels and short and lists and 2"
GATHER = "tests/test_tiers.py -k portable_kernels and gather_dequant-fp8_ds_mla"
CLUSTERS = "tests/test_interpreter.py -k every_kernel and cluster"
SHARED_LISTS = "tests/test_interpreter.py -k every_kernel and shared"
INDEX_LISTS = "tests/test_tiers.py -k portable_kernels and selected_scores and row"
SHARED = "tests/test_tiers.py -k portable_kernels and share_lists-"
OWN = "tests/test_tiers.py -k portable_kernels and own_positions-"
KEPT = "tests/test_tiers.py -k portable_kernels and resolve_rows- and not block"
BLOCKS_KEPT = "tests/test_tiers.py -k portable_kernels and resolve_rows-more"
FETCHED = "tests/test_tiers.py -k portable_kernels and fetch_rows- and not 300"
FORGOTTEN = "tests/test_tiers.py -k portable_kernels and forget_seats-"
SHARED_PREFILL = "tests/test_tiers.py -k portable_kernels and sparse_prefill-shared and 16"
INDEX_DENSE = "tests/test_triton_losses.py -k loss_alone and causal"
GDC_WAIT = "    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes\n"

CPU_MUTANTS = (
    portable(
        "O is never rescaled where few maxima rise",
        AMPERE_ATTENTION,
        "if rose != 0:",
        "if rose < 0:",
        CLIMBING,
    ),
    portable(
        "keys past the end of a selection count",
        "attention/triton/tiles.py",
        "valid = is_slot(slots, rows.num_slots) & (at < end)",
        "valid = is_slot(slots, rows.num_slots)",
        DECODE,
    ),
    portable(
        "the mask is dropped",
        "attention/triton/tiles.py",
        '    s = tl.where(seen, s, float("-inf"))\n',
        "",
        DECODE,
    ),
    portable(
        "values are not rescaled",
        "attention/triton/tiles.py",
        "acc = dot(p, value, acc * alpha[:, None], UPCAST)",
        "acc = dot(p, value, acc, UPCAST)",
        TILES_OF_KEYS,
    ),
    portable(
        "the sum of weights is not rescaled",
        "attention/triton/tiles.py",
        "l * alpha + tl.sum(p, 1)",
        "l + tl.sum(p, 1)",
        TILES_OF_KEYS,
    ),
    portable(
        "the sink is ignored",
        "attention/triton/tiles.py",
        "        l += tl.exp2(sink * LOG2E - m)\n",
        "        l += 0.0\n",
        DECODE,
    ),
    portable(
        "scales of the cache are ignored",
        "attention/triton/tiles.py",
        "(x.reshape(N, NUM_GROUPS, GROUP) * scale[:, :, None])",
        "(x.reshape(N, NUM_GROUPS, GROUP) * (scale[:, :, None] * 0 + 1))",
        DECODE,
    ),
    portable(
        "causal off by one",
        "attention/triton/decode.py",
        "seen = seen & (at[None, :] < limit[:, None])",
        "seen = seen & (at[None, :] <= limit[:, None])",
        CAUSAL,
    ),
    portable(
        "the last tile is skipped",
        "attention/triton/decode.py",
        "    last = tl.minimum(first + steps * BLOCK_N, end)\n",
        "    last = tl.minimum(first + steps * BLOCK_N, end // BLOCK_N * BLOCK_N)\n",
        DENSE,
    ),
    portable(
        "rows of another place in the page",
        "attention/triton/decode.py",
        "(at % L.page_size).to(tl.int64)",
        "((at + 1) % L.page_size).to(tl.int64)",
        DENSE,
    ),
    portable(
        "all tokens of a request have the first one's length",
        "attention/triton/decode.py",
        "            at += token * stream.lengths_token\n",
        "            at += token * 0 * stream.lengths_token\n",
        OWN_LENGTHS,
    ),
    portable(
        "lengths of the extra stream are ignored",
        "attention/triton/prefill.py",
        "extra_length = tl.minimum(tl.load(extra_lengths + token), extra_topk).to(tl.int32)",
        "extra_length = extra_topk + 0",
        STREAMS,
    ),
    portable(
        "the extra stream has the main one's indices",
        "attention/triton/prefill.py",
        "            extra_rows,\n            extra_indices,\n            0,\n",
        "            extra_rows,\n            topk_indices,\n            0,\n",
        STREAMS,
    ),
    portable(
        "parts are not rescaled when merged",
        "attention/triton/merge.py",
        "        acc = acc * alpha + tl.sum(x, 0)\n",
        "        acc = acc + tl.sum(x, 0)\n",
        MERGE,
    ),
    portable(
        "parts have equal weights",
        "attention/triton/merge.py",
        "x * weight[:, None], 0.0)",
        "x, 0.0)",
        MERGE,
    ),
    portable(
        "the tile with the diagonal is not masked",
        "attention/triton/prefill.py",
        '                s = tl.where(seen, s, float("-inf"))\n',
        "",
        PREFILL,
    ),
    portable(
        "the tiles with the diagonal begin one later",
        "attention/triton/prefill.py",
        "whole = tl.maximum(num_keys - num_queries + begin + 1, 0)",
        "whole = tl.maximum(num_keys - num_queries + begin + BLOCK_N, 0)",
        PREFILL,
    ),
    portable(
        "scores see one key too many",
        "indexer/triton.py",
        "inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])",
        "inside = (n[:, None] >= start[None, :]) & (n[:, None] <= end[None, :])",
        RAGGED,
    ),
    portable(
        "negative logits count",
        "indexer/triton.py",
        "logits = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]",
        "logits = logits * w[None, :]",
        RAGGED,
    ),
    portable(
        "missing pages are scored",
        "indexer/triton.py",
        "exists = (page >= 0) & (page < num_pages)\n",
        "exists = page < num_pages\n",
        PAGED,
    ),
    portable(
        "scales of another page",
        "indexer/triton.py",
        "n % PAGE_SIZE * SCALE_ROW\n            score",
        "n * 0 * SCALE_ROW\n            score",
        PAGED,
    ),
    portable(
        "open windows are seen",
        "indexer/triton.py",
        "length = tl.maximum(length, 0) // RATIO",
        "length = tl.cdiv(tl.maximum(length, 0), RATIO)",
        "tests/test_tiers.py -k portable_kernels and indexer_scores_paged-lengths",
    ),
    portable(
        "ties go to the higher id",
        "topk/triton.py",
        "            rank = tl.where(key == threshold, -1 - ids, DEAD_KEY).to(tl.int32)\n",
        "            rank = tl.where(key == threshold, ids - 0x7FFFFFFF, DEAD_KEY).to(tl.int32)\n",
        TIES,
    ),
    portable(
        "NaN is no key",
        "topk/triton.py",
        "return tl.where(x != x, NAN_KEY, ordered_bits(tl.where(x == 0.0, 0.0, x)))",
        "return ordered_bits(tl.where(x == 0.0, 0.0, x))",
        NAN,
    ),
    portable(
        "parts of a projection are not rescaled",
        "projection/triton.py",
        "(acc[step] * alpha[:, None] + tl.sum(y, axis=0),)",
        "(acc[step] + tl.sum(y, axis=0),)",
        PARTS,
    ),
    portable(
        "rotated the other way",
        "quant/triton.py",
        "first = tl.where(rotated, a * cos - b * sin, a)",
        "first = tl.where(rotated, a * cos + b * sin, a)",
        WRITES,
    ),
    portable(
        "a page further on is gathered",
        "gather/triton.py",
        "    offset = position % L.page_size\n",
        "    offset = (position + 1) % L.page_size\n",
        GATHER,
    ),
    portable(
        "the first visible keys are listed",
        "gather/triton.py",
        "        seen - length + column,\n",
        "        column.to(tl.int64),\n",
        "tests/test_tiers.py -k portable_kernels and visible_slots-20",
    ),
    portable(
        "CPU: ties go to the higher column",
        "topk/cpu.py",
        "(equal.cumsum(-1) <= topk - above.sum(-1, keepdim=True))",
        "(equal.flip(-1).cumsum(-1).flip(-1) <= topk - above.sum(-1, keepdim=True))",
        "tests/test_topk.py -k adversarial and 700 and values",
    ),
    portable(
        "CPU: scores without the scales of keys",
        "indexer/cpu.py",
        "return scores if key_scales is None else scores.mul_(key_scales)",
        "return scores",
        "tests/test_tiers.py -k test_cpu and indexer_scores-ragged",
    ),
    portable(
        "the norm of a query leaves its rotated dims out",
        "quant/triton.py",
        "tl.sum(x * x, axis=1) + tl.sum(first * first + second * second, axis=1)",
        "tl.sum(x * x, axis=1)",
        QUERIES,
    ),
    portable(
        "a group's outputs are rotated once more",
        "projection/triton.py",
        "even = tl.where(rotated, a * cos + b * sin, a)",
        "even = tl.where(rotated, a * cos - b * sin, a)",
        GROUPS,
    ),
    portable(
        "a group's outputs are rotated once more, with steps across heads",
        "projection/triton.py",
        "tl.where(is_first, sin, -sin)",
        "tl.where(is_first, -sin, sin)",
        GROUPS_ACROSS,
    ),
    portable(
        "all steps of a head have the dims of the first",
        "projection/triton.py",
        "dim = step * STEP + in_step",
        "dim = step * 0 + in_step",
        GROUP_STEPS,
    ),
    portable(
        "groups take heads by turns",
        "projection/triton.py",
        "head = row // STEPS * HEADS + k // V",
        "head = row // STEPS + k // V * (num_rows // STEPS)",
        GROUPS_ACROSS,
    ),
    portable(
        "the older window takes part with its second series",
        "pool/triton.py",
        "column += tl.where(at < W.ratio, 0, W.dim)[:, None]",
        "column += tl.where(at < W.ratio, W.dim, 0)[:, None]",
        POOL,
    ),
    portable(
        "rows of an earlier step are read from this one",
        "pool/triton.py",
        "in_ring = inside & before_step[:, None] & (source_ring >= 0)",
        "in_ring = inside & before_step[:, None] & (source_ring >= 0) & (W.ring < 0)",
        POOL,
    ),
    portable(
        "the oldest row of a ring is not kept",
        "pool/triton.py",
        "last = tl.maximum(first, end - W.ring)",
        "last = tl.maximum(first, end - W.ring + 1)",
        LONG_POOL,
    ),
    portable(
        "a long step is kept before its windows are pooled",
        "pool/triton.py",
        "is_short = known if W.paged else known & (end - first <= W.ring - WINDOW + 1)",
        "is_short = known",
        LONG_POOL,
    ),
    portable(
        "a long step pools one of the windows that reach before it",
        "pool/triton.py",
        "closing += RATIO\n",
        "closing = end\n",
        LONG_POOL,
    ),
    portable(
        "entries of two requests have one place in a long step",
        "pool/triton.py",
        ".to(tl.int64) // RATIO + middle",
        ".to(tl.int64) // RATIO",
        LONG_POOL,
    ),
    portable(
        "the sink leaves the weights of values as they are",
        "backward/triton.py",
        "p = tl.where(kept, p * share, 0.0)",
        "p = tl.where(kept, p, 0.0)",
        GRADIENTS,
    ),
    portable(
        "a token has the bit of the next token of its list",
        "backward/triton.py",
        "owner = 1 << tl.minimum(",
        "owner = 2 << tl.minimum(",
        SHARED_GRADIENTS,
    ),
    portable(
        "all lists have the mask of the first",
        "backward/triton.py",
        "token_mask.bits + token * token_mask.stride + at",
        "token_mask.bits + at",
        SHARED_GRADIENTS,
    ),
    portable(
        "a row is read because of a token that does not exist",
        "common/groups.py",
        "        seen[-1] &= (1 << num_tokens % list_tokens) - 1\n",
        "        pass\n",
        "tests/test_sparse_attention.py -k nobody_attends",
    ),
    portable(
        "the last terms of a row are left out",
        "common/lists.py",
        "for start in range(begin, end, UNROLL):",
        "for start in range(begin, end - UNROLL + 1, UNROLL):",
        GRADIENTS,
    ),
    portable(
        "terms of a row are added from the last to the first",
        "common/lists.py",
        "entry = tl.load(order + start + i, mask=there, other=0)",
        "entry = tl.load(order + begin + end - 1 - start - i, mask=there, other=0)",
        "tests/test_triton_sparse_attention.py -k order_of_tokens",
    ),
    portable(
        "negative logits of listed rows count",
        "losses/triton.py",
        "score += tl.sum(tl.where(real[None, :], _relu(x) * w[None, :], 0.0), 1)",
        "score += tl.sum(tl.where(real[None, :], x * w[None, :], 0.0), 1)",
        INDEX_LISTS,
    ),
    portable(
        "the slope of the ReLU is 1 everywhere",
        "losses/triton.py",
        "dx = tl.where(x > 0, given * factors[:, None], 0.0)",
        "dx = given * factors[:, None] + x * 0",
        INDEX_LISTS,
    ),
    portable(
        "heads have the same weight in the target, with any sink",
        "losses/triton.py",
        "p *= (1 / (1 + tl.exp2((sink - row_lse) * LOG2E)))[:, None]",
        "p += sink[:, None] * 0",
        "tests/test_tiers.py -k portable_kernels and attention_target-sinks",
    ),
    portable(
        "a token does not see its last row",
        "losses/triton.py",
        "return (row[None, :] >= start[:, None]) & (row[None, :] < end[:, None])",
        "return (row[None, :] >= start[:, None]) & (row[None, :] < end[:, None] - 1)",
        INDEX_DENSE,
    ),
    portable(
        "the target is not divided by its mass",
        "losses/triton.py",
        "scale = 1 / tl.where(all_mass == 0, 1.0, all_mass)",
        "scale = all_mass * 0 + 1",
        "tests/test_tiers.py -k portable_kernels and dense_index_gradients-shared",
    ),
    portable(
        "gradients of keys forget earlier chunks of tokens",
        "losses/triton.py",
        "acc = tl.load(target, mask=mask, other=0)\n    for first in range(0, num_tokens, TOKENS):",
        "acc = keys * 0.0\n    for first in range(0, num_tokens, TOKENS):",
        "tests/test_triton_losses.py -k workspace_does_not",
    ),
    portable(
        "the dims of a byte of FP4 are written in the other order",
        "common/fp4.py",
        "return low | (high << 4)",
        "return high | (low << 4)",
        WRITES_FP4,
    ),
    portable(
        "the dims of a byte of FP4 are read in the other order",
        "common/fp4.py",
        "tl.interleave(decode_e2m1(pairs), decode_e2m1(pairs >> 4))",
        "tl.interleave(decode_e2m1(pairs >> 4), decode_e2m1(pairs))",
        DECODE_FP4,
    ),
    portable(
        "a tie of FP4 goes to the odd code",
        "common/fp4.py",
        "(magnitude > 0.25)",
        "(magnitude >= 0.25)",
        TIES_FP4,
    ),
    portable(
        "the tokens of a list attend to each other's rows",
        "attention/triton/tiles.py",
        "((byte >> bit) & 1 != 0)",
        "(byte != 0)",
        SHARED_PREFILL,
    ),
    portable(
        "the lists of the tokens' numbers",
        "attention/triton/prefill.py",
        "number = token // LIST_TOKENS",
        "number = token // LIST_TOKENS * 0",
        SHARED_PREFILL,
    ),
    portable(
        "the tokens that share a row are not told",
        "lists/triton.py",
        "member | (same << token).to(tl.uint8)",
        "member",
        SHARED,
    ),
    portable(
        "rows of both lists count twice",
        "lists/triton.py",
        "        rank = at + smaller - (both + tl.cumsum(same) - same)\n"
        "        tl.store(out + rank, row, mask=at < length)\n",
        "        rank = at + smaller\n        tl.store(out + rank, row, mask=at < length)\n",
        SHARED,
    ),
    portable(
        "rows of both lists are new",
        "lists/triton.py",
        "new = (at < num_rows) & (same == 0)",
        "new = at < num_rows",
        SHARED,
    ),
    portable(
        "the last union is in the buffer",
        "lists/triton.py",
        "if LIST_TOKENS % 2 == 1:",
        "if LIST_TOKENS % 2 == 0:",
        SHARED,
    ),
    portable(
        "lists that repeat a row are merged",
        "lists/triton.py",
        "(row < after)",
        "(row <= after)",
        "tests/test_triton_lists.py -k repeated",
    ),
    portable(
        "every rank has the positions of the first",
        "lists/triton.py",
        "part = rank + number",
        "part = number",
        OWN,
    ),
    portable(
        "rows of parts in place of rows of the rank",
        "lists/triton.py",
        "row_of(position, NUM_RANKS, INTERLEAVE)",
        "row_of(position, NUM_PARTS, INTERLEAVE)",
        OWN,
    ),
    portable(
        "rows of a rank as if it kept single positions",
        "common/shards.py",
        "// NUM_RANKS * INTERLEAVE",
        "// NUM_RANKS",
        OWN,
    ),
    portable(
        "each step of a list begins anew",
        "lists/triton.py",
        "tl.store(to + count + before, row, mask=own)",
        "tl.store(to + before, row, mask=own)",
        OWN,
    ),
    portable(
        "positions that do not fit 32 bits are cut",
        "lists/triton.py",
        "named = (position >= 0) & (position <= 0x7FFFFFFF)",
        "named = position >= 0",
        OWN,
    ),
    portable(
        "no -1 behind the rows of a rank",
        "lists/triton.py",
        "        tl.store(to + at, tl.full([BLOCK], -1, tl.int32), mask=at < topk)\n\n\ndef own",
        "        tl.store(to + at, tl.full([BLOCK], -1, tl.int32), mask=at < count)\n\n\ndef own",
        OWN,
    ),
    portable(
        "positions of this step are kept",
        "residency/triton.py",
        "kept = key < context",
        "kept = key <= context",
        KEPT,
    ),
    portable(
        "empty rows are not taken first",
        "residency/triton.py",
        "if num_empty > 0:  # not so in a seat that was filled once",
        "if num_empty < 0:",
        KEPT,
    ),
    portable(
        "rows of hits are taken",
        "residency/triton.py",
        "other = (inside & (mark != 2 * i + 2)).to(tl.int32)",
        "other = inside.to(tl.int32)",
        KEPT,
    ),
    portable(
        "keys do not move for the victims before them",
        "residency/triton.py",
        "place = at - less + smaller_entries(",
        "place = at + smaller_entries(",
        KEPT,
    ),
    portable(
        "misses do not move for the victims before them",
        "residency/triton.py",
        "            place += at - less\n",
        "            place += at\n",
        KEPT,
    ),
    portable(
        "misses without a page take a row",
        "residency/triton.py",
        "(inside & ~hit & (slot >= 0))",
        "(inside & ~hit)",
        KEPT,
    ),
    portable(
        "a list that does not ascend counts",
        "residency/triton.py",
        "        if num_wrong > 0:\n            num_listed = 0\n",
        "",
        KEPT,
    ),
    portable(
        "positions of other ranks count",
        "residency/triton.py",
        "(position >= 0) & (owner == rank), local, -1",
        "position >= 0, local, -1",
        KEPT,
    ),
    portable(
        "contexts of ranks are whole contexts",
        "residency/triton.py",
        "context = tl.minimum(_length_of(rank, context, NUM_RANKS, INTERLEAVE), LAST)",
        "context = tl.minimum(context, LAST)",
        KEPT,
    ),
    portable(
        "parts share one list",
        "residency/triton.py",
        "position // INTERLEAVE % PARTS == part",
        "position >= 0",
        KEPT,
    ),
    portable(
        "the last copy of a seat is lost",
        "residency/triton.py",
        "num_resolved % COPIES * (3 * per_seat) + at",
        "(num_resolved + 1) % COPIES * (3 * per_seat) + at",
        KEPT,
    ),
    portable(
        "the next block of rows begins anew",
        "residency/triton.py",
        "            others_before += tl.sum(other)\n",
        "",
        BLOCKS_KEPT,
    ),
    portable(
        "the rows of misses stay at the front of the order",
        "residency/triton.py",
        "new_order + miss - misses, row",
        "new_order + miss, row",
        KEPT,
    ),
    portable(
        "the next block of a list begins anew",
        "residency/triton.py",
        "            misses += tl.sum(missed)\n",
        "            misses = tl.sum(missed)\n",
        BLOCKS_KEPT,
    ),
    portable(
        "tokens of no request keep old results",
        "residency/triton.py",
        "for i in range(padding + share):",
        "for i in range(padding):",
        KEPT,
    ),
    portable(
        "every list begins with the first row",
        "residency/triton.py",
        "column = number - tl.sum(tl.where(ended, count[None, :], 0), axis=1)",
        "column = number",
        FETCHED,
    ),
    portable(
        "counts beyond a list are believed",
        "residency/triton.py",
        "count = tl.minimum(tl.maximum(count, 0), topk)",
        "count = tl.maximum(count, 0)",
        FETCHED,
    ),
    portable(
        "rows that no slot names keep their bytes",
        "residency/triton.py",
        "tl.store(to + unit, bits, mask=inside[:, None] & within)",
        "tl.store(to + unit, bits, mask=valid[:, None] & within)",
        FETCHED,
    ),
    portable(
        "scales stay behind",
        "residency/triton.py",
        "if source_scales is not None:",
        "if source_scales is None:",
        FETCHED,
    ),
    portable(
        "rows behind the first page are those of the first",
        "residency/triton.py",
        "page * REGION.source_page + offset",
        "page * 0 + offset",
        FETCHED,
    ),
    portable(
        "seats keep their keys",
        "residency/triton.py",
        "tl.store(keys + seat * keys_seat + row, tl.full([BLOCK], LAST, tl.int32), mask=inside)",
        "pass",
        FORGOTTEN,
    ),
    portable(
        "the last block is not pinned",
        "indexer/triton.py",
        "tl.where(block == count - 1, -MINUS_INF, tl.minimum(x, LARGEST))",
        "tl.minimum(x, LARGEST)",
        BLOCKS,
    ),
    portable(
        "overflowing scores keep the last block out",
        "indexer/triton.py",
        "-MINUS_INF, tl.minimum(x, LARGEST))",
        "-MINUS_INF, x)",
        "tests/test_tiers.py -k portable_kernels and indexer_topk_blocks-infinite",
    ),
    portable(
        "keys of listed blocks that a token does not see count",
        "indexer/triton.py",
        "tl.minimum(end - block * BLOCK_SIZE, BLOCK_SIZE)",
        "BLOCK_SIZE",
        "tests/test_tiers.py -k portable_kernels and indexer_topk_of_blocks-3",
    ),
    portable(
        "listed blocks behind the last key count",
        "indexer/triton.py",
        "known = (block >= 0) & (block < seen)\n            block",
        "known = block >= 0\n            block",
        OF_BLOCKS,
    ),
    portable(
        "scores without the scales of FP4 keys",
        "indexer/triton.py",
        "[R, NUM_SCALES, BLOCK]) * scale[:, :, None]",
        "[R, NUM_SCALES, BLOCK]) * (scale[:, :, None] * 0 + 1)",
        KEYS_FP4,
    ),
    portable(
        "CTAs of a cluster do not see each other's counts",
        "topk/sm90/radix.py",
        "barrier.cluster.arrive.release.aligned;",
        "barrier.cluster.arrive.relaxed.aligned;",
        CLUSTERS,
    ),
    portable(
        "a list grows past its share of shared memory",
        "topk/sm90/collect.py",
        "setp.lt.and.u32 fits, slot, $8, more{0};",
        "setp.ne.and.u32 fits, slot, 0, more{0};",
        SHARED_LISTS,
    ),
)

ROWS = "attention/sm90/bf16.py"
ROWS_FP8 = "attention/sm90/fp8.py"
FP8_MMA = "attention/sm90/fp8_mma.py"
TILES = "attention/sm90/tiles.py"
FEW_HEADS = "attention/sm90/bf16_few_heads.py"
FEW_HEADS_FP8 = "attention/sm90/fp8_few_heads.py"
SWAP_AB = "attention/sm90/swap_ab.py"
INDEXER = "indexer/sm90.py"
INDEXER_GROUPS = "indexer/groups.py"
AMPERE_INDEXER = "indexer/sm80.py"
AMPERE_PROJECTION = "projection/sm80.py"

# The wait for the validity of keys has no mutant: it is stored while the keys are copied, and the
# kernel waits for their arrival anyway, so no run was seen to read it early.
GPU_MUTANTS = (
    hopper(
        "O is not rescaled for the warpgroup's block",
        FP8_MMA,
        "rescale(acc_a, acc_b, some, smem, HALF)",
        "rescale(acc_a, acc_b, some & (m.shape[0] < 0), smem, HALF)",
        "sparse_prefill",
    ),
    hopper(
        "O is not rescaled for the other's block",
        FP8_MMA,
        "some, smem, OTHER)\n            more",
        "some & (m.shape[0] < 0), smem, OTHER)\n            more",
        "sparse_prefill",
    ),
    hopper(
        "sums of P are not rescaled",
        FP8_MMA,
        "l = l * drop[:, None] + parts",
        "l = l * (drop * 0 + 1)[:, None] + parts",
        "sparse_prefill",
    ),
    hopper(
        "sums of P keep the scales of rows",
        FP8_MMA,
        "p * load_factor(smem, stage, INVERSE)",
        "p * load_factor(smem, stage, SCALE)",
        "sparse_prefill",
    ),
    hopper(
        "an invalid slot has a P",
        FP8_MMA,
        'gl.where(real, gl.log2(scale), float("-inf"))',
        "gl.log2(scale)",
        "sparse_prefill",
    ),
    hopper(
        "the mask is dropped",
        ROWS,
        'return gl.where(seen, s * scale_log2, float("-inf"))',
        "return s * scale_log2",
        "sparse_prefill",
    ),
    hopper(
        "the tokens of a list attend to what the first one does",
        ROWS,
        "gl.where(real, token, 0).to(gl.int32))",
        "(gl.where(real, token, 0) * 0).to(gl.int32))",
        "sparse_prefill",
    ),
    hopper(
        "rows without a member are read",
        ROWS,
        "return marks & ((1 << (shape.num_rows // shape.num_heads)) - 1)",
        "return marks & (255 + 0 * (shape.num_rows // shape.num_heads))",
        "sparse_prefill",
    ),
    hopper(
        "the largest logits of a list are those of its last token",
        ROWS,
        "rows += (first + token) * results.max_logits_token",
        "rows += (first + token * 0) * results.max_logits_token",
        "sparse_prefill",
    ),
    hopper(
        "causal off by one",
        ROWS,
        "seen = seen & (keys[None, :] < limit[:, None])",
        "seen = seen & (keys[None, :] <= limit[:, None])",
        "dense_decode",
    ),
    hopper(
        "the last pair of blocks is skipped",
        ROWS,
        "num_pairs = gl.maximum(gl.cdiv(last - first, PAIR_N), 1)",
        "num_pairs = gl.maximum((last - first) // PAIR_N, 1)",
        "dense_decode",
    ),
    hopper(
        "P is not rescaled for the other half of O",
        ROWS,
        "smem.k_rope.index(zero).store(scale_pairs(p_bf16, alpha[:, None]))",
        "smem.k_rope.index(zero).store(p_bf16)",
        "sparse_prefill",
    ),
    hopper(
        "l of one warpgroup is left out",
        ROWS,
        "    l = l + smem.l.index(1 - HALF).load(S_ROWS)\n",
        "",
        "sparse_prefill",
    ),
    hopper(
        "no wait for the keys' right half",
        ROWS,
        "            mbarrier.wait(smem.kv_right_full.index(1), phase)\n",
        "",
        "sparse_prefill",
        "dense_decode",
    ),
    hopper(
        "no wait for the other warpgroup's P",
        ROWS,
        "            mbarrier.wait(smem.p_full.index(0), phase)\n",
        "",
        "sparse_prefill",
        "dense_decode",
    ),
    hopper(
        "lengths of the extra stream are ignored",
        TILES,
        "extra_end = store_key_limits(limits, extra, shape, begin, request, token, False)",
        "extra_end = extra.num_keys + opaque_zero(split)",
        "sparse_prefill",
        "sparse_decode",
    ),
    hopper(
        "all tokens of a request have the first one's length",
        "attention/rows.py",
        "        at += token * stream.lengths_token\n",
        "        at += token * 0 * stream.lengths_token\n",
        "sparse_decode",
    ),
    hopper(
        "the first block of the extra stream is the main stream's",
        TILES,
        "        if block < blocks.num_main:\n",
        "        if block <= blocks.num_main:\n",
        "sparse_prefill",
        "sparse_decode",
    ),
    hopper(
        "the last block of the extra stream is skipped",
        FEW_HEADS,
        "        all_extra = gl.cdiv(extra_end, BLOCK_N)\n",
        "        all_extra = extra_end // BLOCK_N\n",
        "sparse_prefill",
    ),
    hopper(
        "the mask is dropped",
        ROWS_FP8,
        '        s = gl.where(valid[None, :], s, float("-inf"))\n',
        "        s = s + gl.where(valid[None, :], 0.0, 0.0)\n",
        "sparse_decode",
    ),
    hopper(
        "O is not rescaled",
        ROWS_FP8,
        "if gl.max((smem.alpha.load(ROWS_IN_WARP) != 1.0).to(gl.int32), 0) != 0:",
        "if gl.max((smem.alpha.load(ROWS_IN_WARP) != 1.0).to(gl.int32), 0) == 2:",
        "sparse_decode",
        "dense_decode",
    ),
    hopper(
        "the sink is ignored",
        ROWS_FP8,
        "        l += gl.exp2(sink * LOG2E - m)\n",
        "        l += 0.0 * sink\n",
        "sparse_decode",
    ),
    hopper(
        "no wait for dequantised keys",
        ROWS_FP8,
        "    mbarrier.wait(smem.kv_full.index(stage), step // KV_STAGES & 1)\n",
        "",
        "sparse_decode",
    ),
    hopper(
        "no wait for P",
        ROWS_FP8,
        "                mbarrier.wait(smem.p_full.index(0), step & 1)\n",
        "",
        "sparse_decode",
    ),
    hopper(
        "no wait for the kernel in front",
        ROWS_FP8,
        GDC_WAIT,
        "",
        "sparse_decode",
    ),
    hopper(
        "the mask is dropped",
        FEW_HEADS,
        '    s = gl.where(seen, s, float("-inf"))\n',
        "    s = s + gl.where(seen, 0.0, 0.0)\n",
        "sparse_prefill",
    ),
    hopper(
        "no wait for copies",
        FEW_HEADS,
        "    mbarrier.wait(full, phase)\n    fence_async_shared()\n",
        "    fence_async_shared()\n",
        "sparse_prefill",
    ),
    hopper(
        "l of both consumers is added without rescaling",
        FEW_HEADS,
        "    merged_l += smem.ml.index(CONSUMERS + 1).load(ROW) * gl.exp2(m1 - merged_m)\n",
        "    merged_l += smem.ml.index(CONSUMERS + 1).load(ROW)\n",
        "sparse_prefill",
    ),
    hopper(
        "the last key is skipped",
        SWAP_AB,
        "used = gl.maximum(used, gl.max(gl.where(valid, at + 1, 0), 0))",
        "used = gl.maximum(used, gl.max(gl.where(valid, at, 0), 0))",
        "sparse_decode",
    ),
    hopper(
        "the mask is dropped",
        FEW_HEADS_FP8,
        '    s = gl.where(seen, s, float("-inf"))\n',
        "    s = s + gl.where(seen, 0.0, 0.0)\n",
        "sparse_decode",
    ),
    hopper(
        "no wait for copies",
        FEW_HEADS_FP8,
        "        mbarrier.wait(smem.kv_full.index(stage), (first_block + i) // STAGES & 1)\n",
        "",
        "sparse_decode",
        "dense_decode",
    ),
    hopper(
        "all tiles of heads have the first tile's sinks",
        FEW_HEADS_FP8,
        "            sinks += first * results.sink_token\n",
        "            sinks += first * 0\n",
        "sparse_decode",
    ),
    hopper(
        "O is not rescaled",
        FEW_HEADS_FP8,
        "in_flight = issue_pv_mmas(v0, v1, 0, smem.p.index(zero), acc[0] * rescale)",
        "in_flight = issue_pv_mmas(v0, v1, 0, smem.p.index(zero), acc[0] * (rescale * 0 + 1))",
        "sparse_decode",
        "dense_decode",
    ),
    hopper(
        "scores see one key too many",
        INDEXER,
        "inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])",
        "inside = (n[:, None] >= start[None, :]) & (n[:, None] <= end[None, :])",
        "indexer_scores",
    ),
    hopper(
        "open windows are seen",
        INDEXER_GROUPS,
        "end = gl.maximum(end, 0) // T.ratio",
        "end = (gl.maximum(end, 0) + T.ratio - 1) // T.ratio",
        "indexer_scores_paged",
        "indexer_topk",
    ),
    hopper(
        "negative logits count",
        INDEXER,
        "x = split_by_lane(gl.maximum(acc, 0.0, propagate_nan=PROPAGATE_NAN), T)",
        "x = split_by_lane(acc, T)",
        "indexer_scores",
    ),
    hopper(
        "no wait for keys",
        INDEXER,
        "                mbarrier.wait(smem.k_full.index(stage), parity)\n"
        "                if ORDERED:",
        "                if ORDERED:",
        "indexer_scores",
        "indexer_scores_paged",
        "indexer_topk",
    ),
    hopper(
        "no wait for queries",
        INDEXER,
        "            mbarrier.wait(smem.q_full.index(q_stage), parity)\n",
        "",
        "indexer_scores",
        "indexer_scores_paged",
        "indexer_topk",
    ),
    hopper(
        "no wait for the kernel in front",
        INDEXER,
        GDC_WAIT,
        "",
        "indexer_scores",
        "indexer_scores_paged",
    ),
    hopper(
        "ties go to the higher id",
        "topk/sm90/merge.py",
        "            rank = gl.where(equal, -1 - ids, DEAD_KEY)\n",
        "            rank = gl.where(equal, ids - 0x7FFFFFFF, DEAD_KEY)\n",
        "merge_topk",
    ),
    hopper(
        "columns behind the row count",
        "topk/sm90/registers.py",
        "live = (column >= start) & (column < end)",
        "live = (column >= start) & (column <= end)",
        "select_topk",
    ),
    hopper(
        "rows of up to k are one short",
        "topk/sm90/candidates.py",
        "    if size <= k:\n        store_short_row(o, size, k, pages, row, PAGE_SIZE, WARPS,",
        "    if size <= k:\n        store_short_row(o, size - 1, k, pages, row, PAGE_SIZE, WARPS,",
        "select_topk",
    ),
    hopper(
        "bins are read before all keys are counted",
        "topk/sm90/radix.py",
        '    return text + "bar.sync 0;\\n"\n',
        "    return text\n",
        "select_topk",
    ),
    hopper(
        "one tie too few",
        "topk/sm90/radix.py",
        "setp.gt.and.u32 drop, rank, left, is;",
        "setp.ge.and.u32 drop, rank, left, is;",
        "select_topk",
    ),
    hopper(
        "the sink leaves the weights of values as they are",
        "backward/sm90/two_tiles.py",
        "gl.where(kept, weight * share[:, None], 0.0)",
        "gl.where(kept, weight, 0.0)",
        "sparse_attention_backward",
    ),
    hopper(
        "a token has the bit of the next token of its list",
        "backward/sm90/two_tiles.py",
        "owner = 1 << gl.minimum(",
        "owner = 2 << gl.minimum(",
        "sparse_attention_backward",
    ),
    hopper(
        "all lists have the mask of the first",
        "backward/sm90/two_tiles.py",
        "token_mask.bits + token * token_mask.stride + at",
        "token_mask.bits + at",
        "sparse_attention_backward",
    ),
    hopper(
        "values take what other tokens of the list attend to",
        "backward/sm90/two_tiles.py",
        "gl.where(kept, weight * share[:, None], 0.0)",
        "gl.where(valid[None, :], weight * share[:, None], 0.0)",
        "sparse_attention_backward",
    ),
    hopper(
        "panels are overwritten while MMAs read them",
        "backward/sm90/two_tiles.py",
        "                mbarrier.wait(smem.empty.index(p), phase)\n",
        "",
        "sparse_attention_backward",
    ),
    hopper(
        "queries add the first half of the rows twice",
        "backward/sm90/two_tiles.py",
        "kv, kv_row, row, valid, part * 256, 256, COPY)",
        "kv, kv_row, row, valid, 0, 256, COPY)",
        "sparse_attention_backward",
    ),
    hopper(
        "values take the weights of keys",
        "backward/sm90/two_tiles.py",
        "weights = smem.probs.index(W).permute((1, 0))",
        "weights = smem.dscores.index(W).permute((1, 0))",
        "sparse_attention_backward",
    ),
    hopper(
        "scores forget what the output and the LSE add",
        "backward/sm90/two_tiles.py",
        "(share[:, None] * dp - offset[:, None]) * scale",
        "(share[:, None] * dp) * scale",
        "sparse_attention_backward",
    ),
    hopper(
        "queries do not wait for rows and weights",
        "backward/sm90/two_tiles.py",
        "            mbarrier.wait(smem.full.index(stage), phase)\n            fence",
        "            fence",
        "sparse_attention_backward",
    ),
    hopper(
        "queries add the first half of the RoPE dims twice",
        "backward/sm90/two_tiles.py",
        "rope_row, rope_valid, 512 + part * 32,",
        "rope_row, rope_valid, 512,",
        "sparse_attention_backward",
    ),
    hopper(
        "values take the first half of the gradient twice",
        "backward/sm90/two_tiles.py",
        "_load_half(smem.dout, dout, token, part, bar)",
        "_load_half(smem.dout, dout, token, 0, bar)",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: the sink leaves the weights of values as they are",
        "backward/sm90/one_pass.py",
        "gl.where(kept, weight * share[None, :], 0.0)",
        "gl.where(kept, weight, 0.0)",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: scores forget what the output and the LSE add",
        "backward/sm90/one_pass.py",
        "(share[None, :] * dp - offset[None, :]) * scale",
        "(share[None, :] * dp) * scale",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: a token has the bit of the next token of its list",
        "backward/sm90/one_pass.py",
        "owners.store(1 << gl.minimum(",
        "owners.store(2 << gl.minimum(",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: values take what other tokens of the list attend to",
        "backward/sm90/one_pass.py",
        "gl.where(kept, weight * share[None, :], 0.0)",
        "gl.where(valid[:, None], weight * share[None, :], 0.0)",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: queries add two panels of rows twice",
        "backward/sm90/one_pass.py",
        "smem.kv.index(zero + W + 2)",
        "smem.kv.index(zero + W)",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: terms of a chunk of dims go to the next",
        "backward/sm90/one_pass.py",
        "store_tile(rows + (c - 1) * 64, done",
        "store_tile(rows + c * 64, done",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: a panel is overwritten while MMAs of queries read it",
        "backward/sm90/one_pass.py",
        "                mbarrier.wait(smem.empty.index(p), phase)\n",
        "",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: dS waits for one phase of its barrier only",
        "backward/sm90/one_pass.py",
        "mbarrier.wait(smem.ds.index(1), phase ^ 1)",
        "mbarrier.wait(smem.ds.index(1), 1)",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: queries do not wait for dS",
        "backward/sm90/one_pass.py",
        "            mbarrier.wait(smem.ds.index(0), phase)\n",
        "",
        "sparse_attention_backward",
    ),
    hopper(
        "one pass: the heads of a token come while MMAs read those of the last",
        "backward/sm90/one_pass.py",
        "        mbarrier.wait(smem.heads.index(1), turn)\n",
        "",
        "sparse_attention_backward",
    ),
    hopper(
        "targets: a panel is overwritten while MMAs read it",
        "losses/sm90/targets.py",
        "                    mbarrier.wait(smem.empty.index(stage * PANELS + p), phase)\n",
        "",
        "attention_target",
    ),
    hopper(
        "targets: heads that do not exist attend",
        "losses/sm90/targets.py",
        "gl.where((head < num_heads)[None, :], p, 0.0)",
        "p",
        "attention_target",
    ),
    hopper(
        "terms of index keys take the first 64 dims of the queries twice",
        "losses/sm90/lists.py",
        "operand, panels.index(1), other",
        "operand, panels.index(0), other",
        "selected_scores_backward",
    ),
    hopper(
        "index queries add entries whose score has no slope",
        "losses/sm90/lists.py",
        "b = gl.where(x > 0, g * w[None, :], 0.0)",
        "b = (g * w[None, :] + x * 0)",
        "selected_scores_backward",
    ),
    hopper(
        "the first rows of a list come from the list before",
        "losses/sm90/lists.py",
        "then = gl.where(last, next_token, token)",
        "then = token",
        "selected_scores",
    ),
    hopper(
        "index keys keep the order of an accumulator's dims",
        "losses/sm90/lists.py",
        "copy_(total.unflatten(1, parts).transpose(2, 3))",
        "copy_(total.unflatten(1, parts))",
        "selected_scores_backward",
    ),
    hopper(
        "a token attends to rows that it does not see",
        "losses/sm90/dense.py",
        "gl.where(seen, total, 0.0)",
        "total",
        "dense_index_gradients",
    ),
    hopper(
        "index keys forget earlier chunks of tokens",
        "losses/sm90/dense.py",
        "dk = gl.load(sums + at, mask=there, other=0.0)",
        "dk = gl.zeros([64, DIM], gl.float32, WIDE)",
        "dense_index_gradients",
    ),
    hopper(
        "index queries do not wait for rows and gradients",
        "losses/sm90/dense.py",
        "mbarrier.wait(smem.full.index(stage), phase)\n            x = gl.zeros([64, 64]",
        "x = gl.zeros([64, 64]",
        "dense_index_gradients",
    ),
    hopper(
        "the scale of vectors is ignored",
        "projection/sm90.py",
        "factor = (x_scale * gl.load(scale + row_scale))[:, None]",
        "factor = (x_scale * 0 + gl.load(scale + row_scale))[:, None]",
        "project_heads",
    ),
    hopper(
        "no wait for the kernel in front",
        "projection/sm90.py",
        "        gdc_wait()\n",
        "",
        "project_heads",
    ),
    hopper(
        "the scale of inputs is ignored",
        "projection/sm90_groups.py",
        "factor = gl.load(scales.inputs + at, mask=real, other=0.0)",
        "factor = gl.load(scales.inputs + at, mask=real, other=0.0) * 0 + 1",
        "project_groups",
    ),
    hopper(
        "each split takes the first steps",
        "projection/sm90_groups.py",
        "tile % tiles * OUTPUTS, token, split * STEPS",
        "tile % tiles * OUTPUTS, token, split * 0",
        "project_groups",
    ),
    hopper(
        "one of two parts of tokens has the scales of the other",
        "projection/sm90_groups.py",
        "high += acc * (high_scale * of_weights)[:, None]",
        "high += acc * (low_scale * of_weights)[:, None]",
        "project_groups",
    ),
    hopper(
        "a stage is overwritten while MMAs read it",
        "projection/sm90_groups.py",
        "            mbarrier.wait(smem.empty.index(stage), phase)\n",
        "",
        "project_groups",
    ),
    hopper(
        "inputs are copied before the kernel in front has ended",
        "projection/sm90_groups.py",
        "an earlier kernel may write all but the weights\n        gdc_wait()\n",
        "an earlier kernel may write all but the weights\n        pass\n",
        "project_groups",
    ),
    hopper(
        "parts are not rescaled when merged",
        "attention/triton/merge.py",
        "        acc = acc * alpha + tl.sum(x, 0)\n",
        "        acc = acc + tl.sum(x, 0)\n",
        "merge_states",
        "sparse_decode",
    ),
    hopper(
        "norm without the other dims' weight",
        "quant/triton.py",
        "return tl.where(dim < B.norm_dim, x * rstd * weight, x)",
        "return tl.where(dim < B.norm_dim, x * rstd, x)",
        "fused_rope_rmsnorm_quant",
    ),
    hopper(
        "a page further on is gathered",
        "gather/triton.py",
        "    offset = position % L.page_size\n",
        "    offset = (position + 1) % L.page_size\n",
        "gather_dequant",
    ),
)

AMPERE_MUTANTS = (
    ampere(
        "a slice of the dims is missing in S",
        ONE_TILE,
        "for part in gl.static_range(1, 4):",
        "for part in gl.static_range(1, 3):",
        "sparse_decode",
    ),
    ampere(
        "keys of none and beyond the length have a P",
        ONE_TILE,
        's = gl.where(seen[None, :], s * scale_log2, float("-inf"))',
        "s = s * scale_log2",
        "sparse_decode",
    ),
    ampere(
        "each split attends to the first one's keys",
        ONE_TILE,
        "first = split.to(gl.int32) * BLOCK_N",
        "first = split.to(gl.int32) * 0",
        "sparse_decode",
    ),
    ampere(
        "the lists of splits overlap in their last tile",
        AMPERE_ATTENTION,
        "    end = gl.minimum(end, (first_tile + total) * BLOCK_N)\n",
        "",
        "sparse_decode",
    ),
    ampere(
        "extra keys of the main stream's tile",
        AMPERE_ATTENTION,
        "extra.begin + (tile - keys.num_tiles) * BLOCK_N + n",
        "extra.begin + tile * BLOCK_N + n",
        "sparse_decode",
    ),
    ampere(
        "extra slots from the main list",
        AMPERE_ATTENTION,
        "offset = at.to(gl.int64) + gl.where(is_main, 0, distance)",
        "offset = at.to(gl.int64)",
        "sparse_decode",
    ),
    ampere(
        "O is not rescaled",
        AMPERE_ATTENTION,
        "return acc * alpha_shared.load(O_ROW)[None, :, None]",
        "return acc * (alpha_shared.load(O_ROW) * 0 + 1)[None, :, None]",
        "sparse_decode",
    ),
    ampere(
        "codes of the tile before",
        AMPERE_ATTENTION,
        "coming = load_slots(keys, extra, tile + 3,",
        "coming = load_slots(keys, extra, tile + 2,",
        "sparse_decode",
    ),
    ampere(
        "the sum of weights is not rescaled",
        AMPERE_ATTENTION,
        "l = l * alpha + gl.sum(p, 1)",
        "l = l + gl.sum(p, 1)",
        "sparse_decode",
    ),
    ampere(
        "S without its last slice",
        AMPERE_ATTENTION,
        "for part in gl.static_range(1, SLICES):",
        "for part in gl.static_range(1, SLICES - 1):",
        "sparse_decode",
    ),
    ampere(
        "the sink is ignored",
        AMPERE_ATTENTION,
        "l += gl.exp2(sink * LOG2E - m)",
        "l += gl.exp2(sink * LOG2E - m) * 0.0",
        "sparse_decode",
    ),
    ampere(
        "a tile is read before it has arrived",
        AMPERE_ATTENTION,
        "    async_copy.wait_group(0)\n    copy_ahead(",
        "    copy_ahead(",
        "sparse_decode",
    ),
    ampere(
        "slots of nothing take part",
        AMPERE_ATTENTION,
        'gl.where(seen, sum_slices(s_shared, S) * scale_log2, float("-inf"))',
        "sum_slices(s_shared, S) * scale_log2",
        "sparse_decode",
    ),
    ampere(
        "all tiles of heads have the first one's sinks",
        AMPERE_ATTENTION,
        "sinks += token * results.sink_token",
        "sinks += token * 0",
        "sparse_decode",
    ),
    ampere(
        "a negative length counts",
        AMPERE_ATTENTION,
        "gl.maximum(load_length(stream, request, token), 0)",
        "load_length(stream, request, token)",
        "sparse_decode",
    ),
    ampere(
        "the last valid slot of a list is dropped",
        AMPERE_ATTENTION,
        "gl.where(valid, at + 1, 0)",
        "gl.where(valid, at, 0)",
        "sparse_decode",
    ),
    ampere(
        "bfloat16 dims of values one block too early",
        AMPERE_ATTENTION,
        "last.slice(512 // SLICES - 64, 64, dim=1)",
        "last.slice(512 // SLICES - 128, 64, dim=1)",
        "sparse_decode",
    ),
    ampere(
        "scales of a row's first block",
        AMPERE_ATTENTION,
        "block * 64 // L.scale_block",
        "block * 0",
        "sparse_decode",
    ),
    ampere(
        "codes half as large",
        AMPERE_ATTENTION,
        "mov.b32 c, 0x5c005c00;",
        "mov.b32 c, 0x58005800;",
        "sparse_decode",
    ),
    ampere(
        "the LSE in units of log2",
        AMPERE_ATTENTION,
        "(m + gl.log2(l)) * LN2, mask=real",
        "m + gl.log2(l), mask=real",
        "sparse_decode",
    ),
    ampere(
        "a token sees the next one",
        AMPERE_ATTENTION,
        "+ n)[None, :] < limits[:, None])",
        "+ n)[None, :] <= limits[:, None])",
        "dense_decode",
    ),
    ampere(
        "all rows of a tile are of its first token",
        "attention/rows.py",
        "token = (row // shape.num_heads).to(gl.int64)",
        "token = (row * 0).to(gl.int64)",
        "dense_decode",
    ),
    ampere(
        "negative products count",
        AMPERE_INDEXER,
        "x = (acc + gl.abs(acc)) * w[None, :]",
        "x = (acc + acc) * w[None, :]",
        "indexer_scores_paged",
    ),
    ampere(
        "codes of one operand are over 256",
        AMPERE_INDEXER,
        "w *= 65536.0",
        "w *= 256.0",
        "indexer_scores_paged",
    ),
    ampere(
        "keys without a page have scores",
        AMPERE_INDEXER,
        "inside = inside & (page_of(keys, group.request, in_page, T) >= 0)",
        "inside = inside & (in_page >= 0)",
        "indexer_scores_paged",
    ),
    ampere(
        "scales of keys are ignored",
        AMPERE_INDEXER,
        "total *= scale[:, None]",
        "total *= scale[:, None] * 0.0 + 1.0",
        "indexer_scores_paged",
    ),
    ampere(
        "a token sees the next one",
        AMPERE_INDEXER,
        "(n[:, None] < end[None, :])",
        "(n[:, None] <= end[None, :])",
        "indexer_scores_paged",
    ),
    ampere(
        "a tile is overwritten while it is read",
        AMPERE_INDEXER,
        "ahead = (i + STAGES - 1) % STAGES",
        "ahead = i % STAGES",
        "indexer_scores_paged",
    ),
    ampere(
        "a tile is read before it has arrived",
        AMPERE_INDEXER,
        "async_copy.wait_group(STAGES - 2)",
        "async_copy.wait_group(STAGES - 1)",
        "indexer_scores_paged",
    ),
    ampere(
        "columns after the last tile are not filled",
        AMPERE_INDEXER,
        "            fill_columns(row, high, end)\n",
        "            fill_columns(row, high, high)\n",
        "indexer_scores_paged",
    ),
    ampere(
        "a page's keys twice",
        AMPERE_INDEXER,
        "n = tile * T.block_n + c * PAGE_KEYS",
        "n = tile * T.block_n",
        "indexer_scores_paged",
    ),
    ampere(
        "a token's keys end one too early",
        AMPERE_INDEXER,
        "gl.store(queries.rows + token, end, mask=real)",
        "gl.store(queries.rows + token, end - 1, mask=real)",
        "indexer_topk",
    ),
    ampere(
        "requests of the tokens one further on",
        AMPERE_INDEXER,
        "queries.rows_request + token, group.request, mask=real",
        "queries.rows_request + token, group.request + 1, mask=real",
        "indexer_topk",
    ),
    ampere(
        "inputs keep one bit less than e4m3",
        AMPERE_PROJECTION,
        "shift = gl.full_like(x, 1572864.0)",
        "shift = gl.full_like(x, 3145728.0)",
        "project_heads",
    ),
    ampere(
        "inputs are not rounded by their scales",
        AMPERE_PROJECTION,
        "total += part * (b_scale[:, None, :] * a_scale)",
        "total += part * (b_scale[:, None, :] * 0.0 + a_scale)",
        "project_heads",
    ),
    ampere(
        "weights stay over 256",
        AMPERE_PROJECTION,
        "i % TILES, T, ACC) * 256.0",
        "i % TILES, T, ACC)",
        "project_heads",
    ),
    ampere(
        "scales of the CTA's first outputs",
        AMPERE_PROJECTION,
        "head * call.scale_head + block // SCALE_N",
        "head * call.scale_head + row // SCALE_N",
        "project_heads",
    ),
    ampere(
        "weights are read before they have arrived",
        AMPERE_PROJECTION,
        "            async_copy.wait_group(min(EARLY, ALL - 1 - i))\n            part =",
        "            async_copy.wait_group(min(EARLY, ALL - 1 - i) + 1)\n            part =",
        "project_heads",
    ),
    ampere(
        "all tiles of inputs share memory with the next one",
        AMPERE_PROJECTION,
        "inputs[i % 2].store(some)",
        "inputs[0].store(some)",
        "project_heads",
    ),
    ampere(
        "each block of outputs is stored at the first one",
        AMPERE_PROJECTION,
        "store(out, call.out_token, first, num_tokens, block, total, T)",
        "store(out, call.out_token, first, num_tokens, row, total, T)",
        "project_heads",
    ),
    ampere(
        "tokens that do not exist are stored",
        AMPERE_PROJECTION,
        "at + n[:, None], y, mask=(token < num_tokens)[None, :]",
        "at + n[:, None], y, mask=(token >= 0)[None, :]",
        "project_heads",
    ),
    ampere(
        "only the first group of warps counts",
        AMPERE_PROJECTION,
        "gl.sum(total, 0).to(gl.bfloat16)",
        "gl.max(total, 0).to(gl.bfloat16)",
        "project_heads",
    ),
    ampere(
        "codes of one operand are over 256",
        AMPERE_PROJECTION,
        "T, ACC) * 65536.0",
        "T, ACC) * 256.0",
        "project_groups",
    ),
    ampere(
        "a tile is read before it has arrived",
        AMPERE_PROJECTION,
        "async_copy.wait_group(STAGES - 2)",
        "async_copy.wait_group(STAGES - 1)",
        "project_groups",
    ),
    ampere(
        "a tile is overwritten while it is read",
        AMPERE_PROJECTION,
        "            to = ahead % STAGES\n",
        "            to = i % STAGES\n",
        "project_groups",
    ),
    ampere(
        "scales of inputs of the group's first step",
        AMPERE_PROJECTION,
        "((group * TILES + i) * SPLIT + part) * num_tokens",
        "(group * TILES * SPLIT + part) * num_tokens",
        "project_groups",
    ),
)

LAYERS_OF_V41 = "v41.py -k steps_of_an_engine_agree"

VLLM_MUTANTS = (
    vllm(
        "Hunyuan V4's indexer rotates the first dims",
        "hy_v4.py",
        "positions, rotary_emb, rope_first=False)",
        "positions, rotary_emb)",
        "hy_v4.py -k selects_the_same_as_the_reference and padded",
    ),
    vllm(
        "kernels of Hunyuan V4's indexer are warmed up for the first dims",
        "hy_v4.py",
        "                    rope_first=False,\n",
        "",
        "hy_v4.py -k drafts_have_the_indexer",
    ),
    vllm(
        "Hunyuan V4's indexer refuses no setting",
        "hy_v4.py",
        "        refuse(self.vllm_config, self.head_dim, portable=True)\n",
        "",
        "hy_v4.py -k settings_that_the_indexer",
    ),
    vllm(
        "sinks are dropped",
        "attention.py",
        "        self.sinks = sinks\n",
        "",
        "hy_v4.py -k layer_with_sinks and auto",
    ),
    vllm(
        "a layer that shares entries reads none",
        "deepseek_v41.py",
        "metadata.get(self.compressed_cache_prefix)",
        "metadata.get(self.prefix)",
        LAYERS_OF_V41,
    ),
    vllm(
        "keys are selected among the blocks of the token before",
        "deepseek_v41.py",
        "cache, *request, blocks, block_size=",
        "cache, *request, blocks.roll(1, 0), block_size=",
        LAYERS_OF_V41,
    ),
    vllm(
        "entries of two tokens are rotated like the second",
        "deepseek_v41.py",
        "positions=positions if ratio == 1 else positions - positions % ratio",
        "positions=positions",
        LAYERS_OF_V41,
    ),
    vllm(
        "a dummy step writes to a ring",
        "deepseek_v41.py",
        ".masked_fill(slots < 0, -1)",
        "",
        "v41.py -k dummy_step",
    ),
    vllm(
        "the layer that chooses blocks may have other entries",
        "deepseek_v41.py",
        "if 0 <= source <= layer",
        "if 0 <= source < layer",
        "v41.py -k refused and candidate_source",
    ),
    vllm(
        "a draft's layers get the raw rows of each other",
        "deepseek_v4.py",
        "zip(layers, rows.unbind(1), context_slot_mappings",
        "zip(layers, rows.flip(1).unbind(1), context_slot_mappings",
        "v4.py -k drafts_of_blocks",
    ),
    vllm(
        "a drafted block's list has the window alone",
        "deepseek_v4.py",
        "num_speculative_tokens\n",
        "num_speculative_tokens * 0\n",
        "v4.py -k drafts_of_blocks",
    ),
    vllm(
        "DSpark's drafts are refused for what vLLM sets for them",
        "deepseek_v4.py",
        "drafts_blocks=isinstance(self, DSparkDraft)",
        "drafts_blocks=False",
        "v4.py -k drafts_read_published",
    ),
    vllm(
        "an open pool is selected, too",
        "pooled.py",
        "expand_pools(pools, lengths // ratio,",
        "expand_pools(pools, -(-lengths // ratio),",
        "glm5.py -k agrees_with_transformers",
    ),
    vllm(
        "a token of Dots3Note does not see its own key",
        "indexer.py",
        "seq_lens = metadata.query_start_loc, metadata.seq_lens\n",
        "seq_lens = metadata.query_start_loc, metadata.seq_lens - 1\n",
        "dots3.py -k attention_reads",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """A check's verdict on a mutant: ``found``, ``survives`` or ``broken``; and its last lines."""

    name: str
    file: str
    verdict: str
    output: str


def text_of(mutant: Mutant) -> str:
    """The mutant's file.

    Raises:
        ValueError: the old text does not occur exactly once.
    """
    path = PACKAGE / mutant.folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def run(mutant: Mutant, timeout: float) -> Outcome:
    """Apply a mutant to a copy of the package and run its check."""
    with tempfile.TemporaryDirectory() as folder:
        text = text_of(mutant)
        copy = Path(folder) / "sparsemla"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutant.folder / mutant.file).write_text(text, encoding="utf-8")
        verdict, output = check(mutant.check, Path(folder), mutant.gpu, timeout)
        return Outcome(mutant.name, mutant.file, verdict, output)


def check(arguments: str, source: Path, gpu: str, timeout: float) -> tuple[str, str]:
    """``found`` if the check fails on the package in ``source``, and the end of its output."""
    try:
        if gpu:
            code, output = verify(arguments, source, gpu, timeout)
        else:
            code, output = run_tests(arguments, source, timeout)
    except TimeoutError:
        hangs = (
            gpu != "" and torch.cuda.is_available()
        )  # the interpreter reports a deadlock instead
        return ("found" if hangs else "broken"), f"no end after {timeout:.0f} s"
    end = output[-2000:]
    if code == 0:
        return "survives", end
    if code != 1 or "CompilationError" in output:
        return "broken", end
    if gpu and not any(op["failed"] for op in json.loads(report_of(source).read_text())["ops"]):
        return "broken", end
    return "found", end


def verify(arguments: str, source: Path, gpu: str, timeout: float) -> tuple[int, str]:
    """Exit code and output of ``verify`` on the package in ``source``, as on a GPU."""
    cuda = torch.cuda.is_available()
    where = ["cuda"] if cuda and gpu == "sm_90" else ["cuda" if cuda else "cpu", "--as", gpu]
    command = ["-m", "sparsemla_lab.verify", "--quick", "--device", *where, *arguments.split()]
    command += ["--json", str(report_of(source))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=TESTS.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    return done.returncode, done.stdout + done.stderr


def report_of(source: Path) -> Path:
    return source / "report.json"


def run_tests(arguments: str, source: Path, timeout: float) -> tuple[int | None, str]:
    """Exit code and output of pytest on the package in ``source``."""
    log = source / "log"
    # A process of its own: Triton reads the sources of kernels when they are imported. It starts
    # from one that has imported what is not the package's, which takes longer than most checks.
    context = get_context("forkserver")
    packages = ["hypothesis", "pytest", "torch", "torch._dynamo"]  # which ops import when called
    if "TRITON_INTERPRET" in os.environ:  # which Triton's functions read when they are imported
        packages += ["triton.runtime.interpreter", "triton.experimental.gluon.nvidia.hopper"]
    context.set_forkserver_preload(packages)
    process = context.Process(target=_pytest, args=(arguments, source, log))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError
    return process.exitcode, log.read_text(encoding="utf-8")


def _pytest(arguments: str, source: Path, log: Path) -> None:
    with open(log, "w", encoding="utf-8") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    os.chdir(TESTS.parent)
    if "sparsemla" in sys.modules:
        sys.stderr.write("the server of processes has imported the package, not the mutant\n")
        sys.exit(2)  # neither found nor survives
    gc.freeze()  # pytest collects garbage when it ends, not what the packages have left
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a fifth of the time of most checks
    path, _, expression = arguments.partition(" -k ")
    # hypothesis is imported by now, so that pytest cannot rewrite its assertions.
    options = ["-q", "-x", "-p", "xdist.plugin", "-n", "0", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([*options, path, "-k", expression]))


def run_all(mutants: Iterable[Mutant], jobs: int, timeout: float) -> Iterator[Outcome]:
    """Each mutant's outcome."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda mutant: run(mutant, timeout), mutants)


def right_passes(mutants: Iterable[Mutant], jobs: int, timeout: float) -> list[str]:
    """Checks that fail without a mutant."""
    checks = list(dict.fromkeys((mutant.check, mutant.gpu) for mutant in mutants))

    def passes(one: tuple[str, bool]) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "sparsemla"
            shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            return check(one[0], Path(folder), one[1], timeout)[0] == "survives"

    with ThreadPoolExecutor(jobs) as pool:
        return [
            one[0] for one, good in zip(checks, pool.map(passes, checks), strict=True) if not good
        ]


def hopper_mutants() -> list[Mutant]:
    """Those that this machine can tell."""
    if torch.cuda.is_available():
        return list(GPU_MUTANTS)
    from sparsemla_lab.testing.interpreter import interpreted_ops

    return [
        mutant
        for mutant in GPU_MUTANTS
        if "triton" not in mutant.file
        and set(mutant.check.replace("--op ", "").split()) <= set(interpreted_ops("sm_90"))
    ]


def chosen_mutants(hopper: bool, ampere: bool, vllm: bool) -> Sequence[Mutant]:
    """Those of a tier or of layers in vLLM, or those of kernels that tests find."""
    if hopper:
        return hopper_mutants()
    if vllm:
        return VLLM_MUTANTS
    return AMPERE_MUTANTS if ampere else CPU_MUTANTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and write a line for each; 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hopper",
        action="store_true",
        help="mutants of Hopper's kernels: on a CPU, those that are interpreted",
    )
    parser.add_argument(
        "--ampere", action="store_true", help="mutants of the kernels with Ampere's instructions"
    )
    parser.add_argument("--vllm", action="store_true", help="mutants of layers in vLLM")
    parser.add_argument("--json", type=Path, help="where to write all outcomes")
    parser.add_argument("--jobs", type=int, help="processes at a time; default: 8, on a CPU 2")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a check")
    parser.add_argument("-k", default="", help="only mutants with this in name or file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as conftest.py does in the tests
    jobs = options.jobs or (8 if torch.cuda.is_available() else 2)
    mutants = [
        mutant
        for mutant in chosen_mutants(options.hopper, options.ampere, options.vllm)
        if options.k in f"{mutant.file} {mutant.name}"
    ]
    wrong = right_passes(mutants, jobs, options.timeout)
    for failing in wrong:
        sys.stdout.write(f"fails without a mutant: {failing}\n")
    outcomes = []
    for outcome in run_all(mutants, jobs, options.timeout):
        outcomes.append(outcome)
        sys.stdout.write(f"{outcome.verdict:9} {outcome.file:30} {outcome.name}\n")
        sys.stdout.flush()
    if options.json:
        found = [asdict(outcome) for outcome in outcomes]
        options.json.write_text(json.dumps({"fail": wrong, "mutants": found}, indent=2) + "\n")
    bad = [outcome for outcome in outcomes if outcome.verdict != "found"]
    sys.stdout.write(f"{len(outcomes) - len(bad)} of {len(outcomes)} found\n")
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
