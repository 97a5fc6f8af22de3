"""Without a GPU, Triton kernels run in the interpreter, which is chosen before the import."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

import processes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _repair_interpreter():
    """Repair five differences between the interpreter and a GPU.

    Casts from float32 to bfloat16 round instead of truncating. ``range`` takes a kernel's argument:
    numpy 2.4 refuses the conversion of Triton 3.6; Triton 3.9 has the same repair. A scalar
    comparison becomes a bool when it meets a block: otherwise it has the type of its operands, and
    Triton 3.9 refuses such a mask. The maximum of a number and NaN is the number.
    A value that rounds up to a power of two in e4m3 becomes it: the interpreter gives half of it.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # no Triton on this platform
        return
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl
    fp_to_fp = builder.create_fp_to_fp
    splat = builder.create_splat
    patch_tensor = interpreter._patch_lang_tensor

    def rounding_cast(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def rounding_fp_to_fp(self, src, dst_type, rounding_mode):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv:
            return fp_to_fp(self, src, dst_type, rounding_mode)
        rounded = torch.tensor(src.data).clamp(-448, 448).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)

    def bool_splat(self, ret_ty, arg):
        is_bool = arg.data.dtype.kind == "b"
        return splat(self, ret_ty, interpreter.TensorHandle(arg.data, tl.int1) if is_bool else arg)

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl = rounding_cast
    builder.create_fp_to_fp = rounding_fp_to_fp
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_splat = bool_splat
    interpreter._patch_lang_tensor = patch
    _patch_once(interpreter)


def _patch_once(interpreter):
    """Patch the language once for each grid, and not again for each call of a device function.

    A sixth of the time of a small kernel goes there.
    """
    patch = interpreter._patch_lang
    patched = set()  # while a grid runs

    @functools.cache
    def languages(fn):
        found = (interpreter.tl, interpreter.tl.core)
        return {x for x in found if any(value is x for value in fn.__globals__.values())}

    def patch_new(fn):
        if patched >= languages(fn):
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(languages(fn))
        restore = scope.restore

        def restore_all():
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_new


_repair_interpreter()

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("repeatable")

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_make_parametrize_id(val):
    """Name cache formats and dtypes in test ids."""
    from sparsemla import CacheFormat  # after the choice of the interpreter

    if isinstance(val, CacheFormat):
        return val.name
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    # Workers share the cores; waiting threads of one worker would delay the others.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


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


@pytest.fixture
def run_python(compiler):
    """Runs ``python -c`` with code and arguments, with torch and Triton imported."""
    return functools.partial(processes.run, compiler)


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
