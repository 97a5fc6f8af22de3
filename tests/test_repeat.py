"""Repeated calls launch what a first call would, and only if a first call would pass."""

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

import sparsemla
from sparsemla import (
    FP8_DS_MLA,
    PagedCache,
    dense_decode,
    dispatch,
    indexer_topk,
    select_topk,
    sparse_decode,
    sparse_prefill,
)
from sparsemla.kernels import repeat
from sparsemla_lab.testing.cases import (
    Draw,
    indexer_topk_case,
    shared_prefill_case,
    sparse_prefill_case,
)
from test_errors import CALLS

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction

from sparsemla.kernels.common import device
from sparsemla.kernels.repeat import launches
from sparsemla_lab.testing.compile import TARGETS, believe

# Triton 3.9 announces a change of its default.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
# The suite interprets kernels, which then are no compiled kernels; one test runs all others.
compiled = pytest.mark.skipif(knobs.runtime.interpret, reason="Triton interprets")
HOPPER = next(target for target in TARGETS if target.name == "sm_90")
GPU = torch.device("cuda", 0)
REPEATED = sorted(op for op in CALLS if hasattr(getattr(sparsemla, op), "__wrapped__"))


class Driver:
    """A driver of Hopper GPUs that launches nothing."""

    def get_current_target(self):
        return HOPPER.gpu

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Kernel:
    """A compiled kernel that notes its launches."""

    function = packed_metadata = None

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def launch_metadata(self, *rest):
        return None

    def run(self, *arguments):
        grid, rest = arguments[:3], arguments[9:]  # between them: stream, handle, hooks
        self.launched.append((self.name, grid, *rest))


@pytest.fixture
def launched(monkeypatch):
    """The launches of ops on CPU tensors that stand for tensors of a Hopper GPU."""
    found = []

    def compile_nothing(self, key, signature, index, *rest):
        kernel = Kernel(self.__name__, found)
        self.device_caches[index][0][key] = kernel
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(repeat, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(dispatch, "meant", lambda device: GPU)
    monkeypatch.setattr(device, "meant", lambda device: GPU)
    # Kernels of other tests, in this process, are not of this list.
    monkeypatch.setattr(Driver, "get_current_device", lambda self: id(found))
    monkeypatch.setattr(launches, "current_device", lambda: -1)  # as get_device() of the tensors
    with believe(HOPPER, Driver()):
        yield found


def addresses_of(value):
    """A launch's argument with its tensors as addresses."""
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    if isinstance(value, launches.TensorDescriptor):
        return "descriptor", value.base.data_ptr(), value.shape, value.strides, value.block_shape
    if isinstance(value, tuple):
        return tuple(addresses_of(item) for item in value)
    return value


@contextlib.contextmanager
def count_repeats():
    """A list that grows with each repeated call."""
    repeats = []
    call = repeat._Repeat.__call__

    def count(self, *arguments):
        repeats.append(self)
        return call(self, *arguments)

    with mock.patch.object(repeat._Repeat, "__call__", count):
        yield repeats


def is_repeated(call):
    """Whether a call is repeated from its third time on."""
    with count_repeats() as repeats:
        for _ in range(3):
            call()
    return bool(repeats)


def assert_same_launches(got, expected, known):
    """Launches are equal, apart from addresses of memory that the calls allocate."""
    new = {}

    def compare(one, other):
        if isinstance(other, tuple):
            assert isinstance(one, tuple)
            assert len(one) == len(other)
            for pair in zip(one, other, strict=True):
                compare(*pair)
        elif one != other:
            assert other not in known
            assert new.setdefault(other, one) == one

    compare(tuple(got), tuple(expected))
    assert len(set(new.values())) == len(new)


@compiled
@pytest.mark.parametrize("op", REPEATED)
def test_other_tensors_get_the_launches_of_a_first_call(op, launched):
    call = getattr(sparsemla, op)
    first, second = CALLS[op](), CALLS[op]()
    for _ in range(2):
        call(**first)
    with repeat.unrepeated():
        launched.clear()
        expected_result = call(**second)
    expected = [addresses_of(launch) for launch in launched]
    launched.clear()
    with count_repeats() as repeats:
        result = call(**second)
    assert repeats
    known = {tensor.data_ptr() for tensor in tensors_of(second)}
    assert_same_launches([addresses_of(launch) for launch in launched], expected, known)
    assert type(result) is type(expected_result)
    for one, other in zip(tensors_of(result), tensors_of(expected_result), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.data_ptr() not in known or one is other


def tensors_of(value):
    """The tensors of arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__"):
        value = list(vars(value).values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


@compiled
@pytest.mark.parametrize("kind", ["ascending", "whole"])
def test_both_launches_over_shared_lists_are_repeated(kind, launched):
    case = shared_prefill_case(Draw(0), num_tokens=10, num_heads=64, kind=kind)
    assert is_repeated(lambda: sparse_prefill(**case))
    assert len(launched) == 6  # three calls: two lists of four tokens, then one of two


def decode_arguments():
    cache = PagedCache.allocate(FP8_DS_MLA, num_pages=2, page_size=8)
    q = torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16)
    slots = torch.zeros(2, 1, 4, dtype=torch.int32)
    return {"q": q, "cache": cache, "topk_indices": slots, "softmax_scale": 1.0, "num_splits": 2}


@compiled
@pytest.mark.parametrize(
    "wrong",
    [
        {"num_splits": 2.0},
        {"softmax_scale": "1.0"},
        {"topk_indices": torch.zeros(2, 1, 4)},
        {"topk_indices": torch.zeros(3, 1, 4, dtype=torch.int32)},
        {"topk_indices": torch.zeros(2, 1, 8, dtype=torch.int32)[..., ::2]},
        {"topk_indices": None},
        {"out": torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16).expand(2, 1, 16, 512)},
    ],
    ids=["splits", "scale", "dtype", "batch", "strides", "nothing", "overlap"],
)
def test_a_wrong_call_fails_after_right_ones(wrong, launched):
    right = decode_arguments() | {"out": torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)}
    assert is_repeated(lambda: sparse_decode(**right))
    with pytest.raises((TypeError, ValueError), match=f"sparse_decode: {next(iter(wrong))} "):
        sparse_decode(**right | wrong)


@compiled
def test_one_is_not_true(launched):
    arguments = CALLS["dense_decode"]() | {"causal": True}
    assert is_repeated(lambda: dense_decode(**arguments))
    with pytest.raises(TypeError, match="dense_decode: causal "):
        dense_decode(**arguments | {"causal": 1})


def misaligned(tensor):
    """Zeros like a tensor, at the start of a storage at another address modulo 16."""
    memory = bytearray(tensor.nbytes + 16)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16
    offset = (tensor.data_ptr() - start + 2) % 16
    zeros = torch.frombuffer(memory, dtype=tensor.dtype, offset=offset, count=tensor.numel())
    return zeros.view(tensor.shape)


@compiled
@pytest.mark.parametrize(
    "change",
    [
        lambda right: {"softmax_scale": -0.0},
        lambda right: {"q": misaligned(right["q"])},
        lambda right: {"topk_indices": right["topk_indices"].long()},
        lambda right: {"cache": PagedCache.from_rows(torch.zeros(16, 576).bfloat16())},
    ],
    ids=["sign of zero", "alignment", "dtype", "format"],
)
def test_a_call_of_another_kind_is_no_repeat(change, launched):
    right = decode_arguments() | {"softmax_scale": 0.0}
    assert is_repeated(lambda: sparse_decode(**right))
    with count_repeats() as repeats:
        sparse_decode(**right | change(right))
    assert not repeats


@compiled
def test_a_permission_is_part_of_a_call(launched):
    right = sparse_prefill_case(Draw(0), num_heads=64) | {"allow_fp8_mma": False}
    assert is_repeated(lambda: sparse_prefill(**right))
    with count_repeats() as repeats:
        sparse_prefill(**right | {"allow_fp8_mma": True})
    assert not repeats
    with pytest.raises(TypeError, match="sparse_prefill: allow_fp8_mma "):
        sparse_prefill(**right | {"allow_fp8_mma": "fp8"})


@compiled
@pytest.mark.parametrize("num_heads", [40, 128])
def test_both_launches_of_fp8_mma_are_repeated(num_heads, launched):
    case = sparse_prefill_case(Draw(0), num_heads=num_heads) | {"allow_fp8_mma": True}
    assert is_repeated(lambda: sparse_prefill(**case))
    assert [launch[0] for launch in launched] == ["_round_rows", "_attend_rounded"] * 3


@compiled
def test_calls_that_read_more_than_their_signature_are_not_repeated(launched):
    arguments = decode_arguments()
    two = {
        "extra_cache": arguments["cache"],
        "extra_topk_indices": arguments["topk_indices"].clone(),
    }
    assert not is_repeated(lambda: sparse_decode(**arguments | two))  # one cache in two arguments
    other = PagedCache.allocate(FP8_DS_MLA, num_pages=2, page_size=8)
    two["extra_cache"] = other
    many = {"q": torch.zeros(2, 1, 64, 576, dtype=torch.bfloat16)}
    assert not is_repeated(lambda: sparse_decode(**arguments | two | many))  # their distance
    unsigned = arguments["topk_indices"].to(torch.uint32)
    assert not is_repeated(lambda: sparse_decode(**arguments | {"topk_indices": unsigned}))
    write = CALLS["fused_rope_rmsnorm_quant"]() | {"validate": True}
    assert not is_repeated(lambda: sparsemla.fused_rope_rmsnorm_quant(**write))


@compiled
@pytest.mark.parametrize(
    ("use", "repeated"),
    [
        (lambda x: x[:, 1:].view(-1), True),
        (lambda x: torch.empty_like(x).unsqueeze(0), True),
        (lambda x: x.zero_(), False),
        (lambda x: x[0].fill_(1), False),
        (lambda x: torch.empty_like(x).copy_(x), False),
        (lambda x: x + 1, False),
        (lambda x: x.tolist(), False),
        (lambda x: x.data_ptr(), False),
        (lambda x: x.flatten()[:0], False),  # nothing tells whether it is a view
    ],
    ids=[
        "view",
        "allocation",
        "write",
        "write to a view",
        "copy",
        "sum",
        "list",
        "address",
        "empty",
    ],
)
def test_only_questions_views_and_allocations_are_repeated(use, repeated, launched):
    @repeat.repeated
    def op(x):
        use(x)
        return x

    assert is_repeated(lambda: op(torch.zeros(4, 2))) is repeated


@compiled
def test_whoever_watches_sees_first_calls(launched):
    arguments = decode_arguments()
    call = lambda: sparse_decode(**arguments)  # noqa: E731
    assert is_repeated(call)
    assert launched

    def run(self, *arguments, **options):
        return original(self, *arguments, **options)

    original = JITFunction.run
    for watch in (
        torch.device("cpu"),
        torch.autograd.profiler.profile(),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(knobs.runtime, "launch_enter_hook", print),
        mock.patch.object(launches, "current_device", return_value=1),
        repeat.unrepeated(),
    ):
        with watch:
            assert not is_repeated(call)
    assert is_repeated(call)


# torch compiles its decompositions for the first tangent of a process.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@compiled
def test_repeats_do_not_drop_gradients(launched):
    arguments = decode_arguments()
    assert is_repeated(lambda: sparse_decode(**arguments))
    q = arguments["q"]
    wanting = arguments | {"q": q.clone().requires_grad_()}
    with pytest.raises(ValueError, match="q must not require a gradient"):
        sparse_decode(**wanting)
    with torch.no_grad():
        assert is_repeated(lambda: sparse_decode(**wanting))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="q must not have a tangent"):
            sparse_decode(**arguments | {"q": dual})


@compiled
def test_no_memory_is_kept(launched):
    arguments = decode_arguments()
    for _ in range(3):
        out, lse = sparse_decode(**arguments)
    kept = [weakref.ref(tensor) for tensor in (arguments["cache"].data, arguments["q"], out, lse)]
    del arguments, out, lse
    launched.clear()
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * 4


@compiled
@pytest.mark.parametrize(("max_bytes", "repeated"), [(10**9, True), (6 * 10**7, False)])
def test_a_call_in_chunks_keeps_to_its_bound(max_bytes, repeated, launched, monkeypatch):
    sizes = {"query_lens": (100,), "seq_lens": (100000,), "num_heads": 64, "topk": 2048}
    held = []
    check = repeat._Recorder._check_size

    def watch(self):
        check(self)
        held.append(sum(tensor.nbytes for tensor in self._allocations))

    monkeypatch.setattr(repeat._Recorder, "_check_size", watch)
    arguments = indexer_topk_case(Draw(0), **sizes) | {"max_workspace_bytes": max_bytes}
    assert is_repeated(lambda: indexer_topk(**arguments)) == repeated
    assert 0 < max(held) <= max_bytes


@compiled
def test_old_signatures_are_forgotten(launched, monkeypatch):
    monkeypatch.setattr(repeat, "MAX_SIGNATURES", 2)
    scores = [torch.zeros(3, 40 + n) for n in range(3)]
    assert is_repeated(lambda: select_topk(scores[0], topk=2))
    for row in scores[1:]:
        select_topk(row, topk=2)
    with count_repeats() as repeats:
        select_topk(scores[0], topk=2)
    assert not repeats


@pytest.mark.skipif(not knobs.runtime.interpret, reason="the other tests run by themselves")
def test_with_compiled_kernels():
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
