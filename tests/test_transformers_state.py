"""Enabled models under torch's global states: default device and dtype, autocast, threads, ..."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparsemla.backends.transformers import enable  # noqa: E402
from sparsemla.backends.transformers.cache import CACHE  # noqa: E402
from test_transformers_arguments import ALL_CLASSES, TRAINED, small_model, tokens  # noqa: E402

CPU = torch.device("cpu")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Wrapped(Tensor):
    """A subclass of tensors; copy.deepcopy needs the method."""

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().new_empty(*args, **kwargs).as_subclass(Wrapped)


STATES: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),  # as a GPU is elsewhere
    "default dtype": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
    "subclass": contextlib.nullcontext,
}
IDS = tokens(2, 20)
MASK = torch.ones_like(IDS)
MASK[1, :5] = 0
POSITIONS = (torch.arange(20) % 12)[None]


Wrap = Callable[[Tensor], Tensor]


def inferred(model: Any, handle: Any, wrap: Wrap, seed: int = 0) -> list[Tensor]:
    """Logits of a prefill, of steps over both kinds of caches, over copied rows, and packed."""
    ids, mask = wrap(IDS.roll(seed, 1)), wrap(MASK)
    goes_back = not hasattr(model.config, "text_config")  # GLM-5.3-Flash does not
    results = []
    with torch.no_grad():
        for max_length in (None, 32):
            cache = handle.new_cache(2, max_length)
            results.append(model(ids, attention_mask=mask, **{CACHE: cache}).logits)
            for column in range(2):
                given = {"position_ids": wrap(MASK.sum(1, keepdim=True) + column), CACHE: cache}
                results.append(model(ids[:, column : column + 1], **given).logits)
            again = copy.deepcopy(cache)
            if goes_back:
                again.crop(-2)
            again.batch_repeat_interleave(2)
            again.reorder_cache(torch.tensor([3, 0, 1, 2], device="cpu"))
            results.append(model(ids.repeat(2, 1)[:, :3], **{CACHE: again}).logits)
            again.reset()
        if goes_back:
            results.append(model(ids, position_ids=wrap(POSITIONS)).logits)
    return results


def generated(model: Any, handle: Any, wrap: Wrap, seed: int = 0) -> list[Tensor]:
    """Tokens of generate, padded on the left."""
    options = {"attention_mask": wrap(MASK), "max_new_tokens": 3, "do_sample": False}
    return [model.generate(wrap(IDS.roll(seed, 1)), **options)]


def trained(model: Any, handle: Any, wrap: Wrap, seed: int = 0) -> list[Tensor]:
    """Losses and gradients of a padded batch, and logits of a packed row."""
    ids = wrap(IDS.roll(seed, 1))
    loss = model(ids, attention_mask=wrap(MASK), labels=ids).loss
    results = [loss, model(ids, position_ids=wrap(POSITIONS)).logits]
    if torch.is_grad_enabled():
        wanted = [each for each in model.parameters() if each.requires_grad]
        results += torch.autograd.grad(loss, wanted, allow_unused=True)
    return [each for each in results if each is not None]


@pytest.fixture(scope="module", params=list(ALL_CLASSES))
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


RUNS = {"inference": inferred, "generate": generated}
STAGES = {"dense": trained, "warmup": trained, "sparse": trained}


def run(model: Any, name: str, wrap: Wrap = lambda x: x, seeds: tuple[int, ...] = (0,)) -> Any:
    """Results for each seed; of several seeds each in a thread of its own, at the same time."""
    training: Any = name if name in STAGES else False
    call = (RUNS | STAGES)[name]
    with enable(model, training=training) as handle:
        model.requires_grad_(name != "warmup")
        for module in model.modules():
            if name == "warmup" and hasattr(module, "indexer"):
                module.indexer.requires_grad_(True)
        if len(seeds) == 1:
            return [call(model, handle, wrap, seeds[0])]
        with ThreadPoolExecutor(len(seeds)) as pool:
            return list(pool.map(functools.partial(call, model, handle, wrap), seeds))


def names_of(model: Any) -> list[str]:
    return [*RUNS, *(STAGES if model.config.model_type in TRAINED else ())]


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, Any]:
    return {name: run(model, name)[0] for name in names_of(model)}


def assert_same(got: list[Tensor], expected: list[Tensor], name: str) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(torch.as_tensor(ours.detach()), theirs.detach()), name


def test_each_handle_prints_its_kernels(model):
    with enable(model) as handle:
        *_, line = repr(handle).splitlines()
    attends = (
        "dense_decode cpu" if model.config.model_type == "deepseek_v3" else "sparse_decode cpu"
    )
    assert line.endswith(attends)
    assert ("indexer_topk cpu" in line) == ("dense" not in attends)


@pytest.mark.parametrize("state", STATES)
def test_results_have_the_same_bits(model, expected, state):
    wrap = (lambda x: x.as_subclass(Wrapped)) if state == "subclass" else (lambda x: x)
    for name in names_of(model):
        wanted = expected[name]
        if state == "inference mode" and name in STAGES:  # the loss has no part of the indexers
            with torch.no_grad():
                (wanted,) = run(model, name)
        with STATES[state]():
            (got,) = run(model, name, wrap)
        assert_same(got, wanted, name)


def test_what_inference_mode_made_serves_outside_of_it(model):
    ids = IDS[:1]
    with torch.no_grad(), enable(model):
        wanted = model(ids).logits
    with torch.inference_mode():
        handle = enable(model)
        cache = handle.new_cache(1, 32)
        first = model(ids[:, :9], **{CACHE: cache}).logits
    with handle, torch.no_grad():
        assert torch.equal(model(ids).logits, wanted)
        rest = [model(part, **{CACHE: cache}).logits for part in ids[:, 9:].split([1, 10], 1)]
    error = torch.cat([first, *rest], 1) - wanted
    assert error.abs().max() < 0.05 * wanted.std()


def test_threads_share_a_model(model, expected):
    for name in set(names_of(model)) & {"inference", "sparse"}:
        wanted = expected[name], *run(model, name, seeds=(3,))
        for got, want in zip(run(model, name, seeds=(0, 3)), wanted, strict=True):
            assert_same(got, want, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_the_model(model, expected, dtype):
    """Autocast rounds what it rounds in transformers, and attention computes in bfloat16 anyway."""
    ids = IDS[:1]
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cpu", dtype):
            theirs = model(ids).logits
            with enable(model, page_size=8) as handle:
                whole = model(ids).logits
                cache = handle.new_cache(1, 32)
                parts = [
                    model(part, **{CACHE: cache}).logits for part in ids.split([9, 1, 1, 9], 1)
                ]
                model.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    for ours in (whole, torch.cat(parts, 1)):
        assert ours.dtype == theirs.dtype
        assert ours.isfinite().all()
        error = (ours.float() - exact).pow(2).mean().sqrt() / exact.std()
        assert error < 0.02, float(error)


def test_compiled_steps_under_a_default_device(model):
    """Dynamo does not trace the method ``unflatten`` there; the function, it does."""
    if model.config.model_type not in ("deepseek_v3", "deepseek_v32", "axk2", "deepseek_v4"):
        pytest.skip("the same lines as in the others, or linear attention, which breaks the graph")
    torch._dynamo.reset()
    step = torch.compile(model.__call__, fullgraph=True, backend="eager")
    with torch.no_grad(), enable(model) as handle:
        caches = [handle.new_cache(2, 32) for _ in range(2)]
        for cache in caches:
            model(IDS, **{CACHE: cache})
        given = {"position_ids": torch.full((2, 1), 20)}
        eager = model(IDS[:, :1], **{CACHE: caches[0]}, **given).logits
        with torch.device("cpu"):
            assert torch.equal(step(IDS[:, :1], **{CACHE: caches[1]}, **given).logits, eager)
    torch._dynamo.reset()
