"""Without a GPU, Triton kernels run in the interpreter, which is chosen before the import."""

import functools
import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import processes
from turns import is_late

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # With ATen alone below AVX-512, torch's attention still asks a CPU with AMX to pack for it.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


try:
    from sparsemla_lab.testing.interpreter.portable import repair
except ImportError:  # no Triton on this platform
    pass
else:
    repair()

gc.freeze()  # what packages leave is not garbage; looking at it takes a few percent of the time

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("repeatable")

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_addoption(parser):
    parser.addoption(
        "--turn", type=int, help="of tests that take turns, run those of this number; default: all"
    )


def pytest_collection_modifyitems(config, items):
    turn = config.getoption("turn")
    if turn is not None:
        config.hook.pytest_deselected(items=[item for item in items if is_late(item, turn)])
        items[:] = [item for item in items if not is_late(item, turn)]


def pytest_make_parametrize_id(val):
    """Name cache formats and dtypes in test ids."""
    from sparsemla import CacheFormat  # after the choice of the interpreter

    if isinstance(val, CacheFormat):
        return val.name
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    # Workers share the cores; waiting threads of one worker would delay the others.
    most = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    torch.set_num_threads(min(torch.get_num_threads(), most))  # OMP_NUM_THREADS may ask for fewer


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="session")
def compiler():
    with processes.compiler() as process:
        yield process


@pytest.fixture(scope="session")
def fresh_process():
    """Like ``compiler``, which remembers kernels: nothing is compiled in this one."""
    with processes.compiler("torch._dynamo") as process:  # which ops import when called
        yield process


@pytest.fixture
def run_python(fresh_process):
    """Runs ``python -c`` with code and arguments, with torch and Triton imported."""
    return functools.partial(processes.run, fresh_process)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint as transformers saves it: real latent geometry, two layers, experts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV32Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=64,
        kv_lora_rank=512,
        index_topk=16,
        index_n_heads=16,
        first_k_dense_replace=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint")
    transformers.DeepseekV32ForCausalLM(config).save_pretrained(path)
    return path
