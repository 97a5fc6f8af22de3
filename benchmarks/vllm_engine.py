"""vLLM's engine on a small model: the tokens of this package's backend and of FlashMLA's.

The model is the DeepSeek-V3.2 of :mod:`sparsemla_lab.testing.models`, or with ``--model
deepseek_v4`` the DeepSeek-V4 of :mod:`sparsemla_lab.testing.models_v4`, or with ``--model
deepseek_v41`` the DeepSeek-V4.1 of :mod:`sparsemla_lab.testing.models_v41`: it copies from its
context and is sure of it. With ``--model glm5_next`` it is the GLM-5.3-Flash of
:mod:`sparsemla_lab.testing.models_glm5`, without hyper-connections, which finds tokens by content,
and is compared with transformers' class. With ``--model hy_v4`` it is a Hunyuan V4 with sinks,
gates and hyper-connections, which copies like DeepSeek-V3.2 and is compared with transformers'
class, too, and with ``--model dots3_note`` the layers of a Dots3Note that select tokens, whose
attention is vLLM's in every mode.

Every mode serves the model in a process of its own, with prompts that are longer than a selection,
chunked prefills, and batches of prefills and decodes. Then tokens and log-probabilities are
compared. For each mode a line says which classes served, and which kernels were compiled once it
was ready.

``hisparse`` and ``host`` keep rows on the host, by vLLM's connector and by this package's,
``prefixes`` asks again, from cached prefixes, ``ngram`` copies drafts from the context, ``mtp``
and ``eagle`` have them from a layer or model of its own, and ``async`` schedules a step during the
last one. ``weights fp8`` and ``weights int4`` are quantised, ``lora`` adds an adapter, ``sleep``
answers after the engine has slept, and ``reload`` after other weights were replaced. In ``shared``
modes a GLM-5.2 selects in some layers only. ``records`` writes the selections of each request,
which are compared with those of transformers' model over the same tokens. ``dspark`` drafts blocks
of DeepSeek-V4's tokens.

Modes with ``tp2`` share the heads between two GPUs, those with ``tp2 rows`` also the rows of all
prefills in the indexer, those with ``dcp2`` the contexts, too, those with ``pcp2`` the tokens of
prefills, and those with ``pp2`` the layers; ``tp4 dcp2`` is two pairs of GPUs, each of which shares
contexts. ``a2a`` merges results by all-to-all, ``gathers`` selections by collectives. They are
compared with modes of fewer GPUs. Where there are fewer GPUs, they are left out, with a line, and
those with ``dcp`` also where NCCL is older than 2.29.7.

With ``--share-gpu`` the ranks of every mode share the first GPU, so one GPU serves all modes, only
slower. That needs NCCL 2.30 or newer, for vLLM (``VLLM_NCCL_SO_PATH``) and for PyTorch
(``LD_PRELOAD``). ``--new-tokens`` and ``--prompts`` let a slow mode answer less; it is compared
with the beginnings of the other's answers.

Needs vLLM 0.33 and GPUs that it serves sparse models on. Run ``python benchmarks/vllm_engine.py``,
on two GPUs with ``--gpus 2`` for the modes that need both.

With ``--as sm_80`` the usual command, without plugins and backend named, serves while vLLM, this
package and Triton take the GPU for an older one, for which vLLM has no sparse attention. The driver
translates the code of the older GPU. Tokens are compared with those of the GPU as it is.

Where TileLang is not installed, DeepSeek-V4's hyper-connections are computed in PyTorch, in steps
without CUDA graphs only, and DeepSeek-V4.1's in all steps. What DeepSeek-V4.1 answers is also
compared with what its weights were made to copy.

With ``--portable`` every mode serves vLLM's portable class of DeepSeek-V3.2: its class for NVIDIA
GPUs needs CuTe DSL.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sparsemla_lab.testing import checkpoints

NUM_NEW = 64
LENGTHS = (1500, 700, 60, 1, 2047, 900, 3000)
"""Tokens of the prompts of DeepSeek-V3.2."""
VOCABULARY, HIDDEN, HEADS, VALUE = 1024, 512, 8, 128


@dataclass(frozen=True)
class Mode:
    """One way to serve the model.

    Args:
        plugins: of this package; None names none, so that vLLM loads all.
        backend: vLLM's name of the attention backend; None for the default.
        cache: the cache's dtype.
        graphs: whether steps are captured.
        portable: exchange vLLM's class of the model for NVIDIA for the portable one.
        model: type of the model.
        gpus: that share the heads.
        dcp: of them, those that share each context.
        pcp: of the GPUs, those that divide the tokens of prefills; they do not share heads.
        pp: of the GPUs, those that divide the layers; they do not share heads.
        interleave: consecutive tokens of a context that one of these keeps.
        divides: the GPUs divide the indexer's rows in every prefill, not in long ones only.
        records: selections are recorded.
        more: other arguments of vLLM's engine; a drafting model is one of :data:`CHECKPOINTS`.
        weights: the checkpoint that is served: the model's, or one of :data:`CHECKPOINTS`.
        restart: methods of the engine that are called after a first answer, with their arguments;
            those of workers get the path of the model's checkpoint.
        adapted: prompts are answered with the adapter of :data:`CHECKPOINTS`.
        acting_as: the older GPU that the GPU is taken for.
        transformers: transformers' class serves the model, one prompt after the other.
        gathers: collectives exchange the selections of decodes, where symmetric memory could.
        shares_gpu: all ranks use the first GPU.
        prompts: answered prompts, the first ones; None for all.
        new_tokens: of each answer.
    """

    plugins: str | None
    backend: str | None
    cache: str = "fp8_ds_mla"
    graphs: bool = False
    portable: bool = False
    model: str = "deepseek_v32"
    gpus: int = 1
    dcp: int = 1
    pcp: int = 1
    pp: int = 1
    interleave: int = 1
    divides: bool = False
    records: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "model"
    restart: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    adapted: bool = False
    acting_as: str | None = None
    transformers: bool = False
    gathers: bool = False
    shares_gpu: bool = False
    prompts: int | None = None
    new_tokens: int = NUM_NEW


BOTH = "sparsemla,sparsemla_indexer"
V4: dict[str, Any] = {"cache": "fp8", "model": "deepseek_v4"}
V41: dict[str, Any] = {
    "cache": "fp8",
    "model": "deepseek_v41",
    "more": {"language_model_only": True},  # its class has a part for images
}
GLM: dict[str, Any] = {"model": "glm5_next"}
HY: dict[str, Any] = {"model": "hy_v4"}
DOTS: dict[str, Any] = {"model": "dots3_note", "cache": "bfloat16"}
TP2: dict[str, Any] = {"gpus": 2}
DCP2: dict[str, Any] = {"gpus": 2, "dcp": 2}
TP4: dict[str, Any] = {"gpus": 4}
TP8: dict[str, Any] = {"gpus": 8}
DCP4: dict[str, Any] = {"gpus": 4, "dcp": 4}
DCP8: dict[str, Any] = {"gpus": 8, "dcp": 8}
A2A: dict[str, Any] = {"dcp_comm_backend": "a2a"}
PCP2: dict[str, Any] = {"gpus": 2, "pcp": 2}
PP2: dict[str, Any] = {"gpus": 2, "pp": 2}
HISPARSE: dict[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 2},
    },
    # vLLM's connector copies a layer's rows once a step, and a capture of prefills runs twice.
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
}
HOST: dict[str, Any] = {
    "kv_transfer_config": {
        "kv_connector": "HostRowsConnector",
        "kv_connector_module_path": "sparsemla.backends.vllm.host",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_gib": 1, "rows_per_seat": 2048},
    },
    "num_gpu_blocks_override": 2000,
}
NGRAM: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
}
MTP: dict[str, Any] = {"method": "mtp", "attention_backend": "CUSTOM"}
EAGLE: dict[str, Any] = {
    "speculative_config": {
        "method": "eagle",
        "model": "eagle",
        "num_speculative_tokens": 2,
        "attention_backend": "TRITON_MLA",  # its layer is dense
    }
}
BLOCKS: dict[str, Any] = {
    "weights": "dspark",
    # The last one of a block finds a part of its token in the block's first.
    "more": {"speculative_config": {"method": "dspark", "num_speculative_tokens": 6}},
}
# DeepGEMM would compile a kernel for most shapes and sizes of steps.
FP8: dict[str, Any] = {"weights": "fp8", "more": {"linear_backend": "triton"}}
LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_b_proj", "o_proj", "wq_b", "down_proj"],
}
SLEEP: dict[str, Any] = {"enable_sleep_mode": True}
RELOAD = ("collective_rpc", {"method": "reload_weights"})
LEVEL_1 = (("sleep", {"level": 1}), ("wake_up", {}))
LEVEL_2 = (
    ("sleep", {"level": 2}),
    ("wake_up", {"tags": ["weights"]}),
    RELOAD,
    ("wake_up", {"tags": ["kv_cache"]}),
)
SM_80: dict[str, Any] = {"acting_as": "sm_80"}
SM_89: dict[str, Any] = {"acting_as": "sm_89"}
MODES = {
    "vllm": Mode("", "FLASHMLA_SPARSE"),
    "vllm, graphs": Mode("", "FLASHMLA_SPARSE", graphs=True),
    "attention": Mode("sparsemla", "CUSTOM"),
    "attention, graphs": Mode("sparsemla", "CUSTOM", graphs=True),
    "both": Mode(BOTH, "CUSTOM"),
    "both, graphs": Mode(BOTH, "CUSTOM", graphs=True),
    "both, portable": Mode(BOTH, "CUSTOM", portable=True),
    "vllm, bf16": Mode("", "FLASH_ATTN_MLA_SPARSE", cache="bfloat16"),
    "attention, bf16": Mode("sparsemla", "CUSTOM", cache="bfloat16"),
    "both, bf16, graphs": Mode(BOTH, "CUSTOM", cache="bfloat16", graphs=True),
    "vllm, hisparse": Mode("", "FLASHMLA_SPARSE", graphs=True, more=HISPARSE),
    "both, hisparse": Mode(BOTH, "CUSTOM", graphs=True, more=HISPARSE),
    "both, bf16, hisparse": Mode(BOTH, "CUSTOM", "bfloat16", graphs=True, more=HISPARSE),
    "both, host": Mode(BOTH, "CUSTOM", graphs=True, more=HOST),
    "both, eager, host": Mode(BOTH, "CUSTOM", more=HOST),
    "both, portable, host": Mode(BOTH, "CUSTOM", portable=True, more=HOST),
    "both, bf16, host": Mode(BOTH, "CUSTOM", "bfloat16", graphs=True, more=HOST),
    "both, host, prefixes": Mode(
        BOTH, "CUSTOM", graphs=True, more=HOST | {"enable_prefix_caching": True}
    ),
    "both, host, ngram": Mode(BOTH, "CUSTOM", graphs=True, more=HOST | NGRAM),
    "both, host, async": Mode(BOTH, "CUSTOM", graphs=True, more=HOST | {"async_scheduling": True}),
    "both, host, dcp2": Mode(BOTH, "CUSTOM", graphs=True, more=HOST, **DCP2),
    "both, eager, host, dcp2": Mode(BOTH, "CUSTOM", more=HOST, **DCP2),
    "both, eager, host, dcp4": Mode(BOTH, "CUSTOM", more=HOST, **DCP4),
    "both, prefixes": Mode(BOTH, "CUSTOM", graphs=True, more={"enable_prefix_caching": True}),
    "both, ngram": Mode(BOTH, "CUSTOM", graphs=True, more=NGRAM),
    "both, async": Mode(BOTH, "CUSTOM", graphs=True, more={"async_scheduling": True}),
    **{
        f"both, mtp{count}": Mode(
            BOTH,
            "CUSTOM",
            graphs=True,
            weights="mtp",
            more={"speculative_config": MTP | {"num_speculative_tokens": count}},
        )
        for count in (1, 2, 3)
    },
    "both, mtp2, dcp2": Mode(
        BOTH,
        "CUSTOM",
        graphs=True,
        weights="mtp",
        more={"speculative_config": MTP | {"num_speculative_tokens": 2}},
        **DCP2,
    ),
    "both, bf16, eagle": Mode(BOTH, "CUSTOM", cache="bfloat16", graphs=True, more=EAGLE),
    "vllm, weights fp8": Mode("", "FLASHMLA_SPARSE", graphs=True, **FP8),
    "both, weights fp8": Mode(BOTH, "CUSTOM", graphs=True, **FP8),
    "vllm, weights int4": Mode("", "FLASHMLA_SPARSE", graphs=True, weights="int4"),
    "both, weights int4": Mode(BOTH, "CUSTOM", graphs=True, weights="int4"),
    "vllm, lora": Mode("", "FLASHMLA_SPARSE", graphs=True, more=LORA, adapted=True),
    "both, lora": Mode(BOTH, "CUSTOM", graphs=True, more=LORA, adapted=True),
    "both, sleep1": Mode(BOTH, "CUSTOM", graphs=True, more=SLEEP, restart=LEVEL_1),
    "both, sleep2": Mode(BOTH, "CUSTOM", graphs=True, more=SLEEP, restart=LEVEL_2),
    "both, reload": Mode(BOTH, "CUSTOM", graphs=True, weights="other", restart=(RELOAD,)),
    **{
        f"{name}, shared {how}": Mode(plugins, backend, graphs=True, weights=f"shared {how}")
        for how in ("2", "FSS")
        for name, plugins, backend in (("vllm", "", "FLASHMLA_SPARSE"), ("both", BOTH, "CUSTOM"))
    },
    "both, records": Mode(BOTH, "CUSTOM", graphs=True, records=True),
    "both, eager, records": Mode(BOTH, "CUSTOM", records=True),
    "both, records, ngram": Mode(BOTH, "CUSTOM", graphs=True, records=True, more=NGRAM),
    "both, records, async": Mode(
        BOTH, "CUSTOM", graphs=True, records=True, more={"async_scheduling": True}
    ),
    "both, tp2": Mode(BOTH, "CUSTOM", **TP2),
    "both, graphs, tp2": Mode(BOTH, "CUSTOM", graphs=True, **TP2),
    "both, records, tp2": Mode(BOTH, "CUSTOM", graphs=True, records=True, **TP2),
    "both, tp2 rows": Mode(BOTH, "CUSTOM", divides=True, **TP2),
    "both, graphs, tp2 rows": Mode(BOTH, "CUSTOM", graphs=True, divides=True, **TP2),
    "both, bf16, graphs, tp2": Mode(BOTH, "CUSTOM", cache="bfloat16", graphs=True, **TP2),
    "both, tp4": Mode(BOTH, "CUSTOM", **TP4),
    "both, graphs, tp4": Mode(BOTH, "CUSTOM", graphs=True, **TP4),
    "both, tp8": Mode(BOTH, "CUSTOM", **TP8),
    "attention, pcp2": Mode("sparsemla", "CUSTOM", **PCP2),
    "both, pcp2": Mode(BOTH, "CUSTOM", **PCP2),
    "both, graphs, pcp2": Mode(BOTH, "CUSTOM", graphs=True, **PCP2),
    "both, pp2": Mode(BOTH, "CUSTOM", **PP2),
    "both, graphs, pp2": Mode(BOTH, "CUSTOM", graphs=True, **PP2),
    "vllm, dcp2": Mode("", "FLASHMLA_SPARSE", **DCP2),
    "attention, dcp2": Mode("sparsemla", "CUSTOM", **DCP2),
    "both, dcp2": Mode(BOTH, "CUSTOM", **DCP2),
    "both, graphs, dcp2": Mode(BOTH, "CUSTOM", graphs=True, **DCP2),
    "both, graphs, dcp2 gathers": Mode(BOTH, "CUSTOM", graphs=True, gathers=True, **DCP2),
    "both, graphs, dcp2 a2a": Mode(BOTH, "CUSTOM", graphs=True, more=A2A, **DCP2),
    "both, dcp4": Mode(BOTH, "CUSTOM", **DCP4),
    "both, graphs, dcp4": Mode(BOTH, "CUSTOM", graphs=True, **DCP4),
    "both, dcp8": Mode(BOTH, "CUSTOM", **DCP8),
    "both, tp4 dcp2": Mode(BOTH, "CUSTOM", gpus=4, dcp=2),
    "both, tp4 dcp2 a2a": Mode(BOTH, "CUSTOM", gpus=4, dcp=2, more=A2A),
    "both, tp8 dcp4": Mode(BOTH, "CUSTOM", gpus=8, dcp=4),
    "both, portable, dcp2": Mode(BOTH, "CUSTOM", portable=True, **DCP2),
    "both, bf16, graphs, dcp2": Mode(BOTH, "CUSTOM", cache="bfloat16", graphs=True, **DCP2),
    "both, bf16, dcp2 in pages": Mode(BOTH, "CUSTOM", cache="bfloat16", interleave=64, **DCP2),
    "v4, vllm": Mode("", "FLASHMLA_SPARSE_DSV4", **V4),
    "v4, vllm, graphs": Mode("", "FLASHMLA_SPARSE_DSV4", graphs=True, **V4),
    "v4": Mode("sparsemla", "CUSTOM", **V4),
    "v4, graphs": Mode("sparsemla", "CUSTOM", graphs=True, **V4),
    "v4, tp2": Mode("sparsemla", "CUSTOM", **V4, **TP2),
    "v4, tp4": Mode("sparsemla", "CUSTOM", **V4, **TP4),
    "v4, tp8": Mode("sparsemla", "CUSTOM", **V4, **TP8),
    "v4, graphs, tp2": Mode("sparsemla", "CUSTOM", graphs=True, **V4, **TP2),
    "v4, graphs, tp2 rows": Mode("sparsemla", "CUSTOM", graphs=True, divides=True, **V4, **TP2),
    "v4, no drafts": Mode("sparsemla", "CUSTOM", weights="dspark", **V4),
    "v4, dspark": Mode("sparsemla", "CUSTOM", **V4, **BLOCKS),
    "v4, graphs, dspark": Mode("sparsemla", "CUSTOM", graphs=True, **V4, **BLOCKS),
    "v4, vllm, dspark": Mode("", "FLASHMLA_SPARSE_DSV4", **V4, **BLOCKS),
    "hy, transformers": Mode("", None, transformers=True, **HY),
    "hy, vllm": Mode("", "FLASHMLA_SPARSE", **HY),
    "hy, vllm, bf16": Mode("", "FLASHMLA_SPARSE", cache="bfloat16", **HY),
    "hy, attention": Mode("sparsemla", "CUSTOM", **HY),
    "hy": Mode(BOTH, "CUSTOM", **HY),
    "hy, graphs": Mode(BOTH, "CUSTOM", graphs=True, **HY),
    "hy, bf16": Mode(BOTH, "CUSTOM", cache="bfloat16", **HY),
    "hy, as sm_80": Mode(BOTH, "CUSTOM", **HY, **SM_80),
    "dots, vllm": Mode("", "FLASH_ATTN_MLA_SPARSE", **DOTS),
    "dots": Mode("sparsemla_indexer", "FLASH_ATTN_MLA_SPARSE", **DOTS),
    "dots, graphs": Mode("sparsemla_indexer", "FLASH_ATTN_MLA_SPARSE", graphs=True, **DOTS),
    "v41, vllm": Mode("", "FLASHMLA_SPARSE_DSV41", **V41),
    "v41, vllm, graphs": Mode("", "FLASHMLA_SPARSE_DSV41", graphs=True, **V41),
    "v41": Mode("sparsemla", "CUSTOM", **V41),
    "v41, graphs": Mode("sparsemla", "CUSTOM", graphs=True, **V41),
    "v41, tp2": Mode("sparsemla", "CUSTOM", **V41, **TP2),
    "glm, transformers": Mode("", None, transformers=True, **GLM),
    "glm": Mode(BOTH, "CUSTOM", **GLM),
    "glm, graphs": Mode(BOTH, "CUSTOM", graphs=True, **GLM),
    "glm, bf16": Mode(BOTH, "CUSTOM", cache="bfloat16", **GLM),
    "glm, bf16, graphs": Mode(BOTH, "CUSTOM", cache="bfloat16", graphs=True, **GLM),
    "as sm_80": Mode(None, None, cache="fp8", **SM_80),
    "as sm_80, graphs": Mode(None, None, cache="fp8", graphs=True, **SM_80),
    "as sm_80, weights fp8": Mode(None, None, cache="fp8", weights="fp8", **SM_80),
    "as sm_80, weights int4": Mode(None, None, cache="fp8", weights="int4", **SM_80),
    "as sm_89": Mode(None, None, cache="fp8", **SM_89),
    "as sm_89, graphs": Mode(None, None, cache="fp8", graphs=True, **SM_89),
    "v4, as sm_80": Mode(None, None, **V4, **SM_80),
    "v4, as sm_80, graphs": Mode(None, None, graphs=True, **V4, **SM_80),
    "v4, as sm_89": Mode(None, None, **V4, **SM_89),
    "v4, as sm_89, graphs": Mode(None, None, graphs=True, **V4, **SM_89),
}
PAIRS = (
    ("attention", "vllm"),
    ("attention, graphs", "vllm, graphs"),
    ("both", "vllm"),
    ("both, graphs", "vllm, graphs"),
    ("both, portable", "both"),
    ("attention, bf16", "vllm, bf16"),
    ("both, bf16, graphs", "vllm, bf16"),
    ("vllm, hisparse", "vllm, graphs"),
    ("both, hisparse", "both, graphs"),
    ("both, host", "both, graphs"),
    ("both, eager, host", "both"),
    ("both, portable, host", "both, portable"),
    ("both, bf16, host", "both, bf16, graphs"),
    ("both, host, prefixes", "both, graphs"),
    ("both, host, ngram", "both, graphs"),
    ("both, host, async", "both, graphs"),
    ("both, host, dcp2", "both, graphs, dcp2"),
    ("both, eager, host, dcp2", "both"),
    ("both, eager, host, dcp4", "both"),
    ("both, mtp2, dcp2", "both, graphs"),
    ("both, tp4", "both"),
    ("both, graphs, tp4", "both, graphs"),
    ("both, tp8", "both"),
    ("attention, pcp2", "attention"),
    ("both, pcp2", "both"),
    ("both, graphs, pcp2", "both, graphs"),
    ("both, pp2", "both"),
    ("both, graphs, pp2", "both, graphs"),
    ("both, bf16, hisparse", "both, bf16, graphs"),
    ("both, prefixes", "both, graphs"),
    ("both, ngram", "both, graphs"),
    ("both, async", "both, graphs"),
    *((f"both, mtp{count}", "vllm, graphs") for count in (1, 2, 3)),
    ("both, bf16, eagle", "vllm, bf16"),
    ("both, weights fp8", "vllm, weights fp8"),
    ("both, weights int4", "vllm, weights int4"),
    ("both, lora", "vllm, lora"),
    ("both, sleep1", "vllm, graphs"),
    ("both, sleep2", "vllm, graphs"),
    ("both, reload", "vllm, graphs"),
    ("both, shared 2", "vllm, shared 2"),
    ("both, shared FSS", "vllm, shared FSS"),
    ("both, records", "both, graphs"),
    ("both, eager, records", "both"),
    ("both, records, ngram", "both, graphs"),
    ("both, records, async", "both, graphs"),
    ("both, records, tp2", "both, graphs, tp2"),
    ("both, tp2", "both"),
    ("both, graphs, tp2", "both, graphs"),
    ("both, tp2 rows", "both, tp2"),
    ("both, graphs, tp2 rows", "both, graphs, tp2"),
    ("both, bf16, graphs, tp2", "both, bf16, graphs"),
    ("vllm, dcp2", "vllm"),
    ("attention, dcp2", "attention"),
    ("both, dcp2", "both, tp2"),
    ("both, graphs, dcp2", "both, graphs, tp2"),
    ("both, graphs, dcp2 gathers", "both, graphs"),
    ("both, graphs, dcp2 a2a", "both, graphs"),
    ("both, dcp4", "both"),
    ("both, graphs, dcp4", "both, graphs"),
    ("both, dcp8", "both"),
    ("both, tp4 dcp2", "both"),
    ("both, tp4 dcp2 a2a", "both"),
    ("both, tp8 dcp4", "both"),
    ("both, portable, dcp2", "both, portable"),
    ("both, bf16, graphs, dcp2", "both, bf16, graphs, tp2"),
    ("both, bf16, dcp2 in pages", "both, bf16, graphs, tp2"),
    ("v4", "v4, vllm"),
    ("v4, graphs", "v4, vllm, graphs"),
    ("v4, graphs", "v4"),
    ("v4, tp2", "v4"),
    ("v4, tp4", "v4"),
    ("v4, tp8", "v4"),
    ("v4, graphs, tp2", "v4, graphs"),
    ("v4, graphs, tp2 rows", "v4, graphs, tp2"),
    ("v4, dspark", "v4, no drafts"),
    ("v4, graphs, dspark", "v4, no drafts"),
    ("v4, vllm, dspark", "v4, dspark"),
    ("hy, attention", "hy, vllm"),
    ("hy", "hy, vllm"),
    ("hy, graphs", "hy, vllm"),
    ("hy, bf16", "hy, vllm, bf16"),
    *((mode, "hy, transformers") for mode in ("hy", "hy, graphs", "hy, bf16")),
    ("hy, as sm_80", "hy"),
    ("dots", "dots, vllm"),
    ("dots, graphs", "dots, vllm"),
    ("v41", "v41, vllm"),
    ("v41, graphs", "v41, vllm, graphs"),
    ("v41, graphs", "v41"),
    ("v41, tp2", "v41"),
    ("glm", "glm, transformers"),
    ("glm, graphs", "glm, transformers"),
    ("glm, bf16", "glm, transformers"),
    ("glm, bf16, graphs", "glm, transformers"),
    ("as sm_80", "both, portable"),
    ("as sm_80, graphs", "both, portable"),
    ("as sm_80, weights fp8", "both, weights fp8"),
    ("as sm_80, weights int4", "both, weights int4"),
    ("as sm_89", "both"),
    ("as sm_89, graphs", "both"),
    ("v4, as sm_80", "v4"),
    ("v4, as sm_80, graphs", "v4"),
    ("v4, as sm_89", "v4"),
    ("v4, as sm_89, graphs", "v4"),
)

SHARED = 0.9
"""Least mean share of a list that transformers' model selects, too.

Another rounding changes few entries; lists of another layer or token share a sixth to a half.
"""

ADAPTED = 0.02
"""Least mean distance of log-probabilities with an adapter; roundings are a tenth of it."""

NCCL = (2, 29, 7)
"""Before it, vLLM's reduce-scatter, which merges the results of shared contexts, writes nothing."""

LIBRARY = "libnccl.so.2"
"""NCCL by this name is the one that PyTorch has loaded in this process."""

SHARING_NCCL = (2, 30)
"""Before it, NCCL refuses ranks that share a GPU."""

SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",  # kernels of ranks that wait must leave multiprocessors to the others
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""What lets NCCL and PyTorch's symmetric memory serve ranks that share a GPU, unless set."""

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
}
"""Collectives without NVLink multicast, which shared hosts and virtual machines may not allow.

All are NCCL's, except that vLLM's NVIDIA class of DeepSeek-V3.2 adds and normalises in FlashInfer's
all-reduce where that is installed. No variable turns it off, but ``trtllm`` needs no multicast.
"""


def make_model(
    folder: Path, model_type: str = "deepseek_v32", seed: int = 0, **fields: object
) -> None:
    """Write the model."""
    loud_copying_model(model_type, seed, **fields).save_pretrained(folder)


def loud_copying_model(model_type: str, seed: int = 0, **fields: object) -> Any:  # noqa: ANN401
    """A model of transformers with the head that copies louder than the rest."""
    from sparsemla_lab.testing.models import copying_model

    settings: dict[str, Any] = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": VALUE,
        "index_topk": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    model = copying_model(model_type, seed=seed, dtype=torch.bfloat16, **settings | fields)
    with torch.no_grad():
        layers = model.model.layers
        layers[0].self_attn.q_b_proj.weight.view(HEADS, -1, 256)[0, 128:, 0] *= 2.5
        for number, layer in enumerate(layers):
            for name, weight in layer.mlp.named_parameters():
                if "down_proj" in name:
                    weight *= 0.3
            heads = layer.self_attn.o_proj.weight.view(HIDDEN, HEADS, VALUE)
            heads[:, 1:] *= 0.3
            heads[:, :1] *= 0.3 if number else 2.0
        model.lm_head.weight *= 1 / 16  # logits of the size of a trained model's
    return model


GLM_52: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "indexer_rope_interleave": True,
    "mlp_layer_types": ["dense"] * 3,
}
CHECKPOINTS: dict[str, Callable[[Path, Path], None]] = {
    "mtp": checkpoints.add_mtp_layer,
    "eagle": checkpoints.write_eagle,
    "fp8": checkpoints.quantise_fp8,
    "int4": checkpoints.quantise_int4,
    "adapter": checkpoints.write_adapter,
    "other": lambda _, folder: make_model(folder, seed=1),
    "shared 2": lambda _, folder: make_model(
        folder, **GLM_52, index_topk_freq=2, index_skip_topk_offset=1
    ),
    "shared FSS": lambda _, folder: make_model(folder, **GLM_52, index_topk_pattern="FSS"),
    "dspark": lambda _, folder: make_v4_model(folder, drafts=True),
}
"""What writes another checkpoint from the folder of the model."""


def make_v4_model(folder: Path, *, drafts: bool = False) -> None:
    """Write a DeepSeek-V4 with the heads, the hidden size and the dims of V4-Flash's attention.

    One with DSpark's layer for drafts looks less far back, so that a window has what it copies.
    """
    from safetensors.torch import save_file

    from sparsemla_lab.testing.models_v4 import (
        DSPARK,
        compressed_copying_model,
        published_drafts,
        published_weights,
    )

    far = 100 if drafts else 150
    model = compressed_copying_model(
        head_dim=512,
        rope_dim=64,
        far=far,
        dtype=torch.bfloat16,
        hidden_size=4096,
        num_attention_heads=64,
        o_groups=16,
        o_lora_rank=1024,
        q_lora_rank=1024,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=128,
        moe_intermediate_size=256,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        topk_method="noaux_tc",
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    weights = published_weights(model)
    if drafts:
        model.config.update(DSPARK)
        weights |= published_drafts(model, far)
    model.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def hy_model() -> Any:  # noqa: ANN401 - of transformers
    """A Hunyuan V4 with sinks, gates and its hyper-connections, whose last layer shares."""
    model = loud_copying_model(
        "hy_v4",
        index_topk=512,
        index_n_heads=32,  # vLLM's own indexer takes 32 or 64
        indexer_types=["full", "full", "shared"],
        layer_types=["deepseek_sparse_attention"] * 3,
        mlp_layer_types=["dense"] * 3,
        hc_mult=4,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            # Beside those of other heads than the first, whose scores are far larger.
            layer.self_attn.sinks.copy_(torch.linspace(0, 8, HEADS))
    return model


def make_hy_model(folder: Path) -> None:
    """Write the Hunyuan V4 with the names of published weights."""
    from safetensors.torch import save_file

    from sparsemla_lab.testing.models import published_hy_v4

    model = hy_model()
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": ["HYV4ForCausalLM"], "dtype": "bfloat16"}
    text = model.config.to_dict() | fields | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(text))
    save_file(published_hy_v4(model), folder / "model.safetensors", {"format": "pt"})


def make_dots_model(folder: Path) -> None:
    """Write a Dots3Note that selects in all layers: the model, with another norm and open gates."""
    from safetensors.torch import load_file, save_file

    make_model(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    layers = {name.split(".self_attn.")[0] for name in weights if ".self_attn." in name}
    for layer in layers:
        gate = torch.zeros(HEADS, HIDDEN, dtype=torch.bfloat16)
        gate[:, 0] = 1  # by the constant that every embedding has
        weights[f"{layer}.self_attn.g_proj.weight"] = gate
        norm = torch.full((64,), 4, dtype=torch.bfloat16)
        weights[f"{layer}.self_attn.k_rope_only_layernorm.weight"] = norm
    save_file(weights, path, {"format": "pt"})
    fields = {
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": "dots3_note",
        "layer_types": ["full_attention"] * 3,
        "indexer_rope_interleave": False,
        "attention_gate_type": "headwise",
        "apply_mla_qkv_lora_rescale": False,
        "swa_kv_lora_rank": 1024,
        "swa_qk_rope_head_dim": 64,
        "num_nextn_predict_layers": 0,
    }
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def serve_dots_layers() -> None:
    """Let vLLM serve Dots3Note's language model alone, without the package of its encoders."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    package = ModuleType("vllm.models.dots3_note")
    package.__path__ = [str(Path(vllm.__file__).parent / "models" / "dots3_note")]
    sys.modules[package.__name__] = package
    model = importlib.import_module(f"{package.__name__}.nvidia.model")
    name = "Dots3NoteForCausalLM"
    ModelRegistry.register_model(name, model.Dots3NoteLanguageModelForCausalLM)


def make_v41_model(folder: Path) -> None:
    """Write a DeepSeek-V4.1 with the heads and the dims of its attention."""
    from safetensors.torch import save_file

    from sparsemla_lab.testing.models_v41 import copying_model

    config, weights = copying_model(
        hidden_size=4096,
        num_attention_heads=64,
        o_groups=16,
        o_lora_rank=1024,
        q_lora_rank=1024,
        index_n_heads=32,
        index_topk=128,
        candidate_topk_blocks=32,
        moe_intermediate_size=256,
    )
    weights["head.weight"] *= 1 / 16  # logits of the size of a trained model's
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def glm_model() -> Any:  # noqa: ANN401 - of transformers
    """A GLM-5.3-Flash with the dims of its attention and indexer, and plain residuals.

    Its hyper-connections have one stream, which they read and write with a factor of one.
    """
    from sparsemla_lab.testing.models_glm5 import finding_model

    model = finding_model(
        torch.bfloat16,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        v_head_dim=VALUE,
        indexer_types=["full"] * 3,
        linear_head_dim=64,
        linear_num_heads=4,
        index_topk=128,
        index_n_heads=32,
        index_head_dim=128,
        max_position_embeddings=4096,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.rsplit(".", 1)[-1]
            if "_hc." in name:
                parameter.zero_()
                if part == "base":
                    parameter[0] = 30  # of a sigmoid
        model.lm_head.weight *= 1 / 12  # logits of the size of a trained model's
    return model


def make_glm_model(folder: Path) -> None:
    """Write the language model of GLM-5.3-Flash alone, as vLLM's class of it reads it."""
    from safetensors.torch import load_file, save_file

    model = glm_model()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = {
        name.replace("model.language_model.", "model."): weight
        for name, weight in load_file(path).items()
        if ".hc_" not in name and ".visual." not in name
    }
    save_file(weights, path, {"format": "pt"})
    text = model.config.text_config.to_dict() | {
        "architectures": ["Glm5NextForCausalLM"],
        "dtype": "bfloat16",
        # vLLM's class reads these, transformers' has no fields for them.
        "mhc": False,
        "mla_use_nope": True,
        "indexer_rope_interleave": True,
    }
    (folder / "config.json").write_text(json.dumps(text))


def glm_prompt(draw: np.random.Generator, length: int) -> list[int]:
    """A text in which the next token after ``(a, b)`` is ``(b, c)``, which occurs once."""
    from sparsemla_lab.testing.models_glm5 import PARTS, POOL, SLOT

    order = 1 + draw.permutation(PARTS - 1)
    ids = draw.integers(0, PARTS, length)  # begin with 0, which no token names
    pools = draw.choice(length // POOL, len(order), replace=False)
    ids[pools * POOL + SLOT] = PARTS * order + np.roll(order, 1)
    ids[-1] = order[0]
    return ids.tolist()


def random_prompt(draw: np.random.Generator, length: int, vocabulary: int) -> list[int]:
    """Random tokens, but for the first two."""
    return draw.integers(2, vocabulary, length).tolist()


@dataclass(frozen=True)
class Served:
    """A model, and how it is served.

    Args:
        make: writes it into a folder.
        prompt: draws one of a length.
        lengths: of the prompts.
        max_length: of prompts and answers.
        block_size: of vLLM's caches; None lets vLLM choose.
        step: most tokens of a step.
    """

    make: Callable[[Path], None]
    prompt: Callable[[np.random.Generator, int], list[int]]
    lengths: tuple[int, ...]
    max_length: int
    block_size: int | None
    step: int

    def prompts(self) -> list[list[int]]:
        """The prompts, the same ones at each call."""
        draw = np.random.default_rng(0)
        return [self.prompt(draw, length) for length in self.lengths]


SERVED = {
    "deepseek_v32": Served(
        make_model, partial(random_prompt, vocabulary=VOCABULARY), LENGTHS, 4096, 64, 1024
    ),
    "hy_v4": Served(
        make_hy_model, partial(random_prompt, vocabulary=VOCABULARY), LENGTHS, 4096, 64, 1024
    ),
    "dots3_note": Served(
        make_dots_model, partial(random_prompt, vocabulary=VOCABULARY), LENGTHS, 4096, 64, 1024
    ),
    "glm5_next": Served(
        make_glm_model, glm_prompt, (1500, 700, 64, 2047, 900, 3000), 4096, None, 1024
    ),
    # Of longer contexts the layer of entries of 128 tokens would not know the latest entry.
    # For the hyper-connections vLLM compiles a TileLang kernel for each way to split a sum that a
    # step may take, one after the other: 23 for steps of up to 1024 tokens on 132 multiprocessors,
    # 6 for 256. DeepGEMM compiles a kernel for most of them, too, once a step needs it.
    "deepseek_v4": Served(
        make_v4_model,
        partial(random_prompt, vocabulary=256),
        (1200, 700, 300, 256, 1400, 900, 500),
        1536,
        256,
        256,
    ),
    "deepseek_v41": Served(
        make_v41_model,
        partial(random_prompt, vocabulary=256),
        (1200, 700, 330, 311, 1400, 900, 500),
        1536,
        64,
        256,
    ),
}


TRANSFORMERS: dict[str, Callable[[], Any]] = {"glm5_next": glm_model, "hy_v4": hy_model}
"""Models that transformers serves, too."""


def attention_classes(model: torch.nn.Module) -> list[str]:
    """The model's class, and those that compute its attention."""
    parts = [model]
    for module in model.modules():
        parts.append(getattr(module, "impl", module))
    classes = {type(part) for part in parts}
    kinds = ("Attention", "Compressor", "Impl", "Indexer")
    return [
        f"{type(model).__module__}.{type(model).__qualname__}",
        *sorted(
            f"{each.__module__}.{each.__qualname__}"
            for each in classes
            if any(kind in each.__qualname__ for kind in kinds)
        ),
    ]


def engine_arguments(mode: Mode, model: Path) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    served = SERVED[mode.model]
    rows = {"indexer_tp_shard_min_rows": 1} if mode.divides else {}
    records = {
        "kv_transfer_config": {
            "kv_connector": "RecordsConnector",
            "kv_connector_module_path": "sparsemla.backends.vllm.recording",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "folder": str(model.parent / "records"),
                "model": mode.model,
                "host_gib": 4,
            },
        }
    }
    more = dict(mode.more)
    if (drafts := more.get("speculative_config")) is not None:
        more["disable_log_stats"] = False  # they count drafts
        if "model" in drafts:
            more["speculative_config"] = drafts | {"model": str(model.parent / drafts["model"])}
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "kv_cache_dtype": mode.cache,
        "enforce_eager": not mode.graphs,
        "attention_config": {
            "backend": mode.backend,
            "sparse_mla_force_mqa": True,
            **rows,
        },
        "max_model_len": served.max_length,
        "max_num_batched_tokens": served.step,
        "max_num_seqs": 8,
        "block_size": served.block_size,
        "gpu_memory_utilization": 0.05,  # of the memory must be free
        "kv_cache_memory_bytes": 1 << 30,  # no measurement, so that several can serve at once
        "enable_prefix_caching": False,
        # It times kernels at many sizes, for which a comparison of tokens need not wait.
        "enable_flashinfer_autotune": False,
        "tensor_parallel_size": mode.gpus // (mode.pcp * mode.pp),
        "pipeline_parallel_size": mode.pp,
        "prefill_context_parallel_size": mode.pcp,
        "decode_context_parallel_size": mode.dcp,
        "cp_kv_cache_interleave_size": mode.interleave,
        "disable_custom_all_reduce": True,
        # Named, because vLLM looks for as many GPUs as ranks before it chooses this one itself.
        **({"distributed_executor_backend": "mp"} if mode.shares_gpu and mode.gpus > 1 else {}),
        **(records if mode.records else {}),
        **more,
    }


def checkpoints_of(mode: Mode) -> set[str]:
    """Names of the checkpoints that a mode needs beside the model's."""
    drafting = mode.more.get("speculative_config", {}).get("model")
    return {mode.weights, *([drafting] if drafting else []), *(["adapter"] if mode.adapted else [])}


def count(worker: Any) -> None:  # noqa: ANN401 - of vLLM
    """Begin to count the compilations of a worker's process."""
    from sparsemla.kernels.common.compiling import count_compilations

    worker.counting = count_compilations()
    worker.kernels = worker.counting.__enter__()


def counted(worker: Any) -> tuple[list[str], list[str]]:  # noqa: ANN401 - of vLLM
    """Kernels that the process compiled since, and those that it found in Triton's cache."""
    return worker.kernels.compiled, worker.kernels.loaded


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Let vLLM, this package and Triton take the GPU for an older one.

    vLLM asks NVML, and more of torch's properties than are pretended. DeepGEMM sees the GPU as it
    is, so its functions refuse all calls.
    """
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import deep_gemm

    def unsupported(*args: object) -> None:
        raise RuntimeError("DeepGEMM: Unsupported architecture")

    from sparsemla_lab.testing import emulate

    real = torch.cuda.get_device_properties(0)
    with emulate.acting_as(name):
        older = torch.cuda.get_device_properties(0)

        class Properties:
            def __getattr__(self, field: str) -> Any:  # noqa: ANN401 - of torch's properties
                return getattr(older if hasattr(older, field) else real, field)

        found = DeviceCapability(older.major, older.minor)
        platform = type(current_platform)
        with (
            mock.patch.object(torch.cuda, "get_device_properties", return_value=Properties()),
            mock.patch.object(platform, "get_device_capability", return_value=found),
            # One that is set keeps vLLM from looking up the others, which then are missing.
            mock.patch.object(deep_gemm, "_tf32_hc_prenorm_gemm_impl", unsupported),
        ):
            yield


@contextmanager
def sharing_a_gpu(num_ranks: int) -> Iterator[None]:
    """Let all ranks of an engine that starts here use the first GPU.

    vLLM maps ranks to GPUs by a list, which workers get with their configuration. Only its option
    for that list refuses to name a GPU twice.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    gpus = [current_platform.device_id_to_physical_device_id(0)] * num_ranks
    with mock.patch.object(EngineArgs, "_resolve_device_ids", return_value=gpus):
        yield


def gathering() -> Any:  # noqa: ANN401 - of unittest.mock
    """Let ranks exchange all selections by collectives."""
    from sparsemla import ExchangeWorkspace

    refused = None, "the mode gathers selections"
    return mock.patch.object(ExchangeWorkspace, "_connect", return_value=refused)


def transports(worker: Any) -> list[str]:  # noqa: ANN401 - of vLLM
    """How the rank exchanges the selections of decodes, of each of its builders."""
    from sparsemla.backends.vllm.indexer import ShardedIndexerMetadataBuilder

    return [
        "collective" if builder.workspace is None else builder.workspace.transport
        for groups in worker.model_runner.attn_groups
        for group in groups
        for builder in group.metadata_builders
        if isinstance(builder, ShardedIndexerMetadataBuilder)
    ]


Number = Tensor | float
Streams = tuple[Tensor, ...]


def exchange_hyper_connections() -> None:
    """Let vLLM's class of DeepSeek-V4 compute its hyper-connections in PyTorch, not in TileLang."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch
    from vllm.models.deepseek_v4.nvidia import dspark, model

    def pre(streams: Tensor, *rest: Number, norm_weight: Tensor, norm_eps: float) -> Streams:
        *mixes, x = mhc_pre_torch(streams, *rest)
        return *mixes, torch.rms_norm(x, x.shape[-1:], norm_weight, norm_eps)

    def first(
        x: Tensor, fn: Tensor, *rest: Number, fn_broadcast: Tensor, **norm: Number
    ) -> Streams:
        streams = x[:, None].repeat(1, fn.shape[1] // x.shape[1], 1)
        return streams, *pre(streams, fn, *rest, **norm)

    def between(*args: Number, n_splits: int, tile_n: int, **norm: Number) -> Streams:
        streams = mhc_post_torch(*args[:4])
        return streams, *pre(streams, *args[4:], **norm)

    def last(
        streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, eps: float
    ) -> Tensor:
        x = streams.flatten(1).float()
        gates = x @ fn.T * (x.square().mean(1, keepdim=True) + rms_eps).rsqrt()
        gates = (gates * scale + base).sigmoid() + eps
        return (gates[..., None] * streams.float()).sum(1).to(streams.dtype)

    model.mhc_pre_tilelang = pre
    model.mhc_pre_broadcast_tilelang = first
    model.mhc_fused_post_pre_tilelang = between
    for module in (model, dspark):
        module.mhc_post_tilelang = mhc_post_torch
        module.hc_head_fused_kernel_tilelang = last


def exchange_shifted_hyper_connections() -> None:
    """The same for DeepSeek-V4.1, each of whose sublayers reads its input by the mixes before."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch
    from vllm.models.deepseek_v41.nvidia import model

    def pre(
        streams: Tensor,
        *rest: Number,
        norm_weight: Tensor,
        norm_eps: float,
        **mixes: Tensor | None,
    ) -> Streams:
        *found, x, mix = mhc_pre_delayed_torch(streams, *rest, **mixes)
        return *found, torch.rms_norm(x, x.shape[-1:], norm_weight, norm_eps), mix

    def between(
        *args: Number,
        pre_mix: Tensor,
        norm_weight: Tensor,
        norm_eps: float,
        **_: bool | torch.cuda.Stream | None,
    ) -> Streams:
        streams = mhc_post_torch(*args[:4])
        norm: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": norm_eps}
        return streams, *pre(streams, *args[4:], pre_mix=pre_mix, **norm), streams[:0, 0]

    model.mhc_pre_delayed_tilelang = pre
    model.mhc_shifted_post_pre = between
    model.mhc_post_tilelang = mhc_post_torch
    # Layers of captured steps name TileLang's kernels for vLLM's warm-up.
    for name, member in (
        ("tilelang_kernels", {"mhc_fused_post_pre_splits": lambda *_: ()}),
        ("warmup", {"MHC_PRE_NORM_KERNEL": mock.Mock()}),
    ):
        stand_in: Any = ModuleType(f"vllm.model_executor.kernels.mhc.{name}")
        vars(stand_in).update(member)
        sys.modules[stand_in.__name__] = stand_in


def serve(mode: Mode, model: Path, result: Path) -> None:
    """Serve the model and write what came of each prompt.

    Raises:
        RuntimeError: other classes serve than the mode asks for, or answers are missing.
    """
    # The scheduler runs in this process, where the model's class is exchanged; the workers of
    # several GPUs are its forks. DeepGEMM compiles for these requests only, once they need it.
    os.environ.pop("VLLM_PLUGINS", None)
    if mode.plugins is not None:
        os.environ["VLLM_PLUGINS"] = mode.plugins
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        **NO_MULTICAST,
    }
    if mode.acting_as is not None:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # its processes would compile for the real GPU
    shares = mode.shares_gpu and mode.gpus > 1
    if shares:
        os.environ |= SHARED_GPU | os.environ  # what is set stays
    with (
        acting_as(mode.acting_as) if mode.acting_as else nullcontext(),
        sharing_a_gpu(mode.gpus) if shares else nullcontext(),
        gathering() if mode.gathers else nullcontext(),
    ):
        found = _serve_by_transformers(mode) if mode.transformers else _serve(mode, model)
    asked = len(SERVED[mode.model].prompts()[: mode.prompts])
    counts = [len(answer["tokens"]) for answer in found["answers"]]
    if counts != [mode.new_tokens] * asked:
        raise RuntimeError(f"{asked} answers must have {mode.new_tokens} tokens each, got {counts}")
    result.write_text(json.dumps(found))


def _serve_by_transformers(mode: Mode) -> dict[str, Any]:
    """What :func:`_serve` tells, of transformers' class of the model with eager attention."""
    began = time.perf_counter()
    model = TRANSFORMERS[mode.model]().to("cuda" if torch.cuda.is_available() else "cpu")
    ready, answers = time.perf_counter(), []
    for ids in SERVED[mode.model].prompts()[: mode.prompts]:
        text = torch.tensor([ids], device=model.device)
        whole = model.generate(
            text,
            attention_mask=torch.ones_like(text),
            min_new_tokens=mode.new_tokens,
            max_new_tokens=mode.new_tokens,
            do_sample=False,
        )
        with torch.no_grad():
            logits = model(whole[:, :-1]).logits[0].float()
        best = logits[len(ids) - 1 :].topk(2).values
        known = logits[: len(ids) - 1].log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
        answers.append(
            {
                "prompt": known.tolist(),
                "tokens": whole[0, len(ids) :].tolist(),
                "margin": float((best[:, 0] - best[:, 1]).min()),
            }
        )
    seconds = [ready - began, time.perf_counter() - ready]
    named = f"{type(model).__module__}.{type(model).__qualname__}"
    return {
        "answers": answers,
        "classes": [named],
        "compiled": [],
        "loaded": [],
        "seconds": seconds,
        "shared": [],
        "drafts": {},
        "exchanges": [],
    }


def serve_portable_class() -> None:
    """Let vLLM serve DeepSeek-V3.2 by its portable class, not by that for NVIDIA."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins

    from sparsemla.backends.vllm import GENERIC_MODELS

    load_general_plugins()
    for architecture, name in GENERIC_MODELS.items():
        ModelRegistry.register_model(architecture, name)


def _serve(mode: Mode, model: Path) -> dict[str, Any]:
    """What came of each prompt, and of the start."""
    began = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.import_utils import has_tilelang

    if mode.portable:
        serve_portable_class()
    served = SERVED[mode.model]
    if mode.model == "deepseek_v4" and not has_tilelang():
        exchange_hyper_connections()
    if mode.model == "dots3_note":
        serve_dots_layers()
    if mode.model == "deepseek_v41" and not has_tilelang():
        exchange_shifted_hyper_connections()
    llm = LLM(**engine_arguments(mode, model.parent / mode.weights))
    classes, *others = llm.apply_model(attention_classes)
    ours = any(name.startswith("sparsemla.") for name in classes)
    portable = classes[0].startswith("vllm.model_executor.models.")
    named = mode.plugins != ""
    needs_portable = mode.portable or (mode.acting_as == "sm_80" and mode.model == "deepseek_v32")
    if ours != named or portable < needs_portable or any(x != classes for x in others):
        raise RuntimeError(f"{mode} needs other classes than those that serve: {classes, *others}")
    ready = time.perf_counter()
    prompts = [{"prompt_token_ids": ids} for ids in served.prompts()[: mode.prompts]]
    params = SamplingParams(
        temperature=0,
        max_tokens=mode.new_tokens,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        detokenize=False,
    )
    found, shared = [], []
    lora = LoRARequest("adapter", 1, str(model.parent / "adapter")) if mode.adapted else None
    if mode.restart or mode.adapted:
        before = llm.generate(prompts[:1], params)
    for name, options in mode.restart:
        path = {"kwargs": {"weights_path": str(model)}} if name == "collective_rpc" else {}
        getattr(llm, name)(**options, **path)
    llm.collective_rpc(count)
    answers = llm.generate(prompts, params, lora_request=lora)
    if mode.adapted:
        plain, adapted = (prompt_log_probabilities(each[0]) for each in (before, answers))
        if (away := np.abs(np.subtract(plain, adapted)).mean()) < ADAPTED:
            raise RuntimeError(
                f"the adapter must change log-probabilities by {ADAPTED}, got {away}"
            )
    if mode.more.get("enable_prefix_caching"):
        # Again, from cached prefixes: vLLM reads none of prompts whose log-probabilities it gives.
        again = SamplingParams(
            temperature=0, max_tokens=mode.new_tokens, ignore_eos=True, logprobs=2, detokenize=False
        )
        for answer, later in zip(answers, llm.generate(prompts, again), strict=True):
            longer = len(answer.prompt_token_ids) > (served.block_size or math.inf)
            if longer and not later.num_cached_tokens:
                raise RuntimeError("no prefix was found in the cache")
            answer.outputs = later.outputs
    answered = time.perf_counter()
    kernels = llm.collective_rpc(counted)
    exchanges = llm.collective_rpc(transports) if mode.dcp > 1 and "indexer" in mode.plugins else []
    drafts = {
        name: next(
            each.value
            for each in llm.get_metrics()
            if each.name == f"vllm:spec_decode_num_{name}_tokens"
        )
        for name in ("draft", "accepted")
        if "speculative_config" in mode.more
    }
    if mode.records:
        from sparsemla.backends.vllm.recording import write_records

        llm.collective_rpc(write_records, args=([each.kv_transfer_params for each in answers],))
        shared = shared_with_transformers(answers, model)
        if min(shared) < SHARED:
            raise RuntimeError(f"recorded lists must share {SHARED} with others, got {shared}")
    for answer in answers:
        best = [
            sorted(each.logprob for each in step.values()) for step in answer.outputs[0].logprobs
        ]
        found.append(
            {
                "prompt": prompt_log_probabilities(answer),
                "tokens": list(answer.outputs[0].token_ids),
                "margin": min(each[-1] - each[-2] for each in best),
            }
        )
    return {
        "answers": found,
        "classes": classes,
        "compiled": [name for compiled, _ in kernels for name in compiled],
        "loaded": [name for _, loaded in kernels for name in loaded],
        "seconds": [ready - began, answered - ready],
        "shared": shared,
        "drafts": drafts,
        "exchanges": sorted({each for rank in exchanges for each in rank}),
        "copied": copied_share(answers) if mode.model == "deepseek_v41" else None,
    }


def copied_share(answers: Sequence[Any]) -> float:
    """The share of answered tokens that a DeepSeek-V4.1 of this program was made to copy.

    Args:
        answers: of vLLM.
    """
    from sparsemla_lab.testing.models_v41 import FIRST_COPIED, copied_tokens

    right = []
    for answer in answers:
        prompt, found = answer.prompt_token_ids, answer.outputs[0].token_ids
        ids = torch.tensor([*prompt, *found])
        begin = max(len(prompt), FIRST_COPIED + 1)
        right.append(copied_tokens(ids)[begin - 1 - FIRST_COPIED : -1] == ids[begin:])
    return float(torch.cat(right).float().mean())


def prompt_log_probabilities(answer: Any) -> list[float]:  # noqa: ANN401 - of vLLM
    """Of the tokens of its prompt, but for the first."""
    pairs = zip(answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True)
    return [step[token].logprob for step, token in pairs]


def shared_with_transformers(answers: Sequence[Any], folder: Path) -> list[float]:
    """For each layer and long answer the mean share of a list that transformers selects, too.

    Args:
        answers: of vLLM.
        folder: of the model.

    Raises:
        ValueError: an answer has no record, or one of other tokens or layers.
    """
    from transformers import DeepseekV32ForCausalLM  # vLLM registers another class for the type

    from sparsemla import FP8_DS_MLA
    from sparsemla.backends.records import read_record
    from sparsemla.backends.transformers import enable

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DeepseekV32ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    topk, shares = model.config.index_topk, []
    for answer in answers:
        tokens = [*answer.prompt_token_ids, *answer.outputs[0].token_ids][:-1]
        recorded = read_record(answer.kv_transfer_params["selection_record"]).checked(
            model=model.config.model_type, topk=topk, num_tokens=len(tokens)
        )
        ids = torch.tensor([tokens], device=device)
        with enable(model, cache_format=FP8_DS_MLA, record_selections=True) as inference:
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
            )
        (expected,) = inference.selections
        if expected.keys() != recorded.keys():
            raise ValueError(f"the record must have layers {[*expected]}, got {[*recorded]}")
        for layer_idx, lists in recorded.items():
            theirs, found = (_members(part, len(tokens)) for part in (expected[layer_idx], lists))
            if len(tokens) > topk:  # the first ones select all that they see
                shares.append(float((theirs & found)[topk:].sum(1).float().mean() / topk))
    return shares


def _members(lists: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Whether each list has each position: bool ``[T, num_tokens]``."""
    found = torch.zeros(len(lists), num_tokens + 1, dtype=torch.bool)
    return found.scatter_(1, lists.cpu().long() % (num_tokens + 1), True)[:, :-1]


def describe(name: str, folder: Path) -> None:
    """Tell what served in a mode, and what was compiled for it."""
    report = json.loads((folder / f"{name}.json").read_text())
    start, rest = report["seconds"]
    sys.stdout.write(
        f"{name}: ready after {start:.0f} s, answered in {rest:.1f} s; compiled while serving: "
        f"{report['compiled'] or 'nothing'}, loaded: {report['loaded'] or 'nothing'}; "
        f"classes: {', '.join(report['classes'])}\n"
    )
    if report.get("copied") is not None:
        sys.stdout.write(f"{name}: {report['copied']:.4f} of answered tokens are copies\n")
    if report["drafts"]:
        sys.stdout.write(
            "{}: accepted {accepted} of {draft} drafts\n".format(name, **report["drafts"])
        )
    if report["exchanges"]:
        sys.stdout.write(f"{name}: exchanged selections: {', '.join(report['exchanges'])}\n")
    if report["shared"]:
        sys.stdout.write(
            f"{name}: recorded lists share at least {min(report['shared']):.4f} of their entries "
            "with those of transformers' model, on average over an answer in a layer\n"
        )
    sys.stdout.flush()


def compare(name: str, base: str, folder: Path) -> bool:
    """Tell how far two modes are apart, and whether all tokens are equal, as far as both answer."""
    read = (json.loads((folder / f"{each}.json").read_text())["answers"] for each in (name, base))
    pairs = list(zip(*read, strict=False))
    tokens = [[answer["tokens"] for answer in pair] for pair in pairs]
    count = min(len(each) for pair in tokens for each in pair)
    equal = sum(ours[:count] == theirs[:count] for ours, theirs in tokens)
    apart = np.concatenate([np.abs(np.subtract(a["prompt"], b["prompt"])) for a, b in pairs])
    margin = min(ours["margin"] for ours, _ in pairs)
    sys.stdout.write(
        f"{name} and {base}: {equal} of {len(pairs)} answers of {count} tokens are equal, with "
        f"margins of at least {margin:.2f}; log-probabilities of {apart.size} tokens of prompts "
        f"are {apart.mean():.4f} apart, {apart.max():.4f} at most\n"
    )
    return equal == len(pairs)


STACKS_SECONDS = 2
"""For the processes of a mode that has taken too long to write their stacks."""


def serve_apart(
    command: Sequence[str],
    names: Sequence[str],
    folder: Path,
    at_once: int,
    limit: float,
    total: float = math.inf,
    present: int = 1,
    tell: Callable[[str, Path], object] | None = describe,
) -> set[str]:
    """Serve each of these by a process of its own, and tell of each as it ends.

    Args:
        command: of this program.
        names: of the modes, in the order in which they start.
        folder: for results and logs.
        at_once: modes that are served at once.
        limit: seconds for a mode.
        total: seconds for all; a mode that has less than a tenth of ``limit`` is left out.
        present: number of GPUs, over which modes of one GPU are spread.
        tell: what is called for each that wrote a result.

    Returns:
        The names of those that wrote a result.
    """
    end = time.monotonic() + total
    single = [name for name in names if MODES[name].gpus == 1] if present > 1 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(present))))
    devices = visible.split(",")

    def run(name: str) -> None:
        (folder / f"{name}.json").unlink(missing_ok=True)
        left = min(limit, end - time.monotonic())
        if left < limit / 10:
            sys.stdout.write(f"{name}: left out, {max(left, 0):.0f} s are left\n")
            return
        path = folder / f"{name}.log"
        whole = [*command, "--folder", str(folder), "--limit", f"{left:g}", "--serve", name]
        environment = dict(os.environ)
        if name in single:
            environment["CUDA_VISIBLE_DEVICES"] = devices[single.index(name) % len(devices)]
        with (
            path.open("w") as log,
            subprocess.Popen(
                whole, stdout=log, stderr=log, env=environment, start_new_session=True
            ) as process,
        ):
            try:
                failed = f"failed with code {process.wait(left)}"
            except subprocess.TimeoutExpired:
                failed = f"did not end in {left:.0f} s"
                os.killpg(process.pid, signal.SIGABRT)
                time.sleep(STACKS_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that its end has left
        if failed == "failed with code 0":
            if tell is not None:
                tell(name, folder)
            return
        last = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
        sys.stdout.write(f"{name}: {failed}; the end of {path}:\n{last}\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, names))
    return {name for name in names if (folder / f"{name}.json").exists()}


def select_modes(
    model: str,
    gpus: int | None,
    present: int,
    nccl: tuple[int, ...],
    only: Collection[str] | None = None,
    acting_as: str | None = None,
) -> list[str]:
    """The modes to serve; those that need more than is present are named and left out.

    Args:
        model: type of the model.
        gpus: only modes of so many GPUs, and those that they are compared with; None for all.
        present: number of GPUs here.
        nccl: version of NCCL here.
        only: these modes in this order, each behind those that it is compared with; None for all.
        acting_as: only modes as this older GPU, and those that they are compared with; None for
            all others.
    """
    modes = {name: mode for name, mode in MODES.items() if mode.model == model}
    chosen = {name for name, mode in modes.items() if mode.acting_as == acting_as}
    if gpus is not None:
        chosen = {name for name in chosen if modes[name].gpus == gpus}
    if gpus is not None or acting_as is not None:
        chosen |= {base for name, base in PAIRS if name in chosen}
    modes = {name: mode for name, mode in modes.items() if name in chosen}
    if only is not None:
        bases = {each: [base for name, base in PAIRS if name == each] for each in only}
        modes = {name: MODES[name] for each in only for name in (*bases[each], each)}
    served = []
    for name, mode in modes.items():
        if mode.gpus > present:
            sys.stdout.write(f"{name}: left out, needs {mode.gpus} GPUs and finds {present}\n")
        elif mode.dcp > 1 and nccl < NCCL:
            needed, found = (".".join(map(str, version)) for version in (NCCL, nccl))
            sys.stdout.write(f"{name}: left out, needs NCCL {needed} and finds {found}\n")
        else:
            served.append(name)
    return served


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that vLLM loads; PyTorch's, unless a variable names another one."""
    return version_of(os.environ.get("VLLM_NCCL_SO_PATH", LIBRARY))


def version_of(path: str) -> tuple[int, ...]:
    """The version of the NCCL in a file."""
    code = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def check_sharing() -> None:
    """Refuse ranks that share a GPU where an NCCL would.

    Raises:
        RuntimeError: vLLM or PyTorch loads an NCCL that is older than :data:`SHARING_NCCL`.
    """
    path = os.environ.get("VLLM_NCCL_SO_PATH", LIBRARY)
    places = {"VLLM_NCCL_SO_PATH": path, "LD_PRELOAD": LIBRARY}
    for variable, path in places.items():
        if (found := version_of(path)) < SHARING_NCCL:
            needed, old = (".".join(map(str, each)) for each in (SHARING_NCCL, found))
            raise RuntimeError(
                f"ranks share a GPU with NCCL {needed} or newer only, got {old} of {path}; "
                f"{variable} can name a newer libnccl.so.2"
            )


def main() -> int:
    """Serve the model by every mode; 1 if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SERVED, default="deepseek_v32", help="type of the model")
    parser.add_argument("--folder", type=Path, default=Path("vllm-engine"), help="for all files")
    parser.add_argument("--serve", choices=MODES, help="one mode only, in this process")
    parser.add_argument("--gpus", type=int, help="only modes of so many GPUs, and their bases")
    parser.add_argument("--only", nargs="+", choices=MODES, help="these modes, and their bases")
    parser.add_argument(
        "--as", dest="acting_as", choices=["sm_80", "sm_89"], help="take the GPU for this one"
    )
    parser.add_argument(
        "--portable", action="store_true", help="serve vLLM's portable class in every mode"
    )
    parser.add_argument(
        "--share-gpu", action="store_true", help="all ranks of a mode use the first GPU"
    )
    parser.add_argument("--prompts", type=int, help="answer only the first ones; default all")
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW, help="of each answer")
    parser.add_argument("--at-once", type=int, default=1, help="modes that are served at once")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a mode")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds for all modes")
    arguments = parser.parse_args()
    folder, model = arguments.folder, arguments.folder / "model"
    if arguments.share_gpu:
        check_sharing()
    if arguments.serve:
        # Where it hangs, its log ends with what each thread was doing.
        # Told to abort, this process and the workers, its forks, write their stacks.
        faulthandler.enable()
        mode = MODES[arguments.serve]
        mode = replace(
            mode,
            portable=mode.portable or arguments.portable,
            shares_gpu=arguments.share_gpu,
            prompts=arguments.prompts,
            new_tokens=arguments.new_tokens,
        )
        serve(mode, model, folder / f"{arguments.serve}.json")
        return 0
    present = torch.cuda.device_count()
    if arguments.share_gpu:
        present = max(mode.gpus for mode in MODES.values())
    nccl = nccl_version() if present > 1 else ()
    chosen = arguments.only, arguments.acting_as
    modes = select_modes(arguments.model, arguments.gpus, present, nccl, *chosen)
    SERVED[arguments.model].make(model)
    for name, make in CHECKPOINTS.items():
        if any(name in checkpoints_of(MODES[mode]) for mode in modes):
            make(model, folder / name)
    command = [sys.executable, __file__, "--new-tokens", str(arguments.new_tokens)]
    command += ["--portable"] if arguments.portable else []
    command += ["--prompts", str(arguments.prompts)] if arguments.prompts else []
    command += ["--share-gpu"] if arguments.share_gpu else []
    limits = arguments.limit, arguments.total
    spread = 1 if arguments.share_gpu else present
    served = serve_apart(command, modes, folder, arguments.at_once, *limits, spread)
    equal = [compare(name, base, folder) for name, base in PAIRS if {name, base} <= served]
    return int(served != set(modes) or not all(equal))


if __name__ == "__main__":
    sys.exit(main())
