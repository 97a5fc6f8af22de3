"""Continuous batching: its pages, its schedule, and that tokens depend on neither."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batching import PREFACE, Batcher, PagePool, main, page_keys
from sparsemla import slots_of
from tiny_model import TinyModel

VOCAB = 5


class EchoModel:
    """The next token is an exact hash of a request's pages, so any mix-up of pages shows."""

    device = "cpu"

    def __init__(self, num_pages, page_size):
        self.page_size = page_size
        self.rows = torch.full((num_pages * page_size,), -99)

    def step(self, plan, token_ids):
        real = plan.slot_mapping >= 0
        self.rows[plan.slot_mapping[real]] = token_ids[real]
        logits = torch.zeros(plan.num_tokens, VOCAB)
        for token in real.nonzero().flatten().tolist():
            seen = torch.arange(int(plan.positions[token]) + 1)
            requests = torch.full_like(seen, int(plan.request_ids[token]))
            slots = slots_of(plan.page_table, requests, seen, self.page_size)
            assert (slots >= 0).all()
            logits[token, next_token(self.rows[slots].tolist())] = 1
        return logits


def next_token(tokens):
    return hash(tuple(tokens)) % VOCAB


def continued(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


def check_pages(batcher):
    """Each page is free or has the right user count; pages to be written have one user."""
    pool = batcher.pool
    lists = [request.pages for request in batcher.running]
    for page, users in enumerate(pool.users):
        assert users == sum(pages.count(page) for pages in lists)
    assert pool.num_free == pool.users.count(0)
    for request in batcher.running:
        for page in request.pages[request.num_cached // pool.page_size :]:
            assert pool.users[page] == 1
    for request in batcher.waiting:
        assert not request.num_cached


@st.composite
def workloads(draw):
    page_size, num_pages = draw(st.integers(1, 4)), draw(st.integers(2, 10))
    start = draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))  # prefix shared by prompts
    ends = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
    prompts = draw(
        st.lists(
            st.tuples(st.sampled_from([[], start]), ends).map(lambda both: both[0] + both[1]),
            min_size=1,
            max_size=6,
        )
    )
    jobs = [(prompt, draw(st.integers(1, 6)), draw(st.integers(0, 3))) for prompt in prompts]
    max_requests = draw(st.integers(1, 4))
    limits = {
        "max_requests": max_requests,
        "max_step_tokens": draw(st.integers(max_requests, 12)),
    }
    return page_size, num_pages, jobs, limits


@given(workloads())
def test_tokens_do_not_depend_on_the_batch(workload):
    page_size, num_pages, jobs, limits = workload
    pool = PagePool(num_pages, page_size)
    batcher = Batcher(EchoModel(num_pages, page_size), pool, **limits)
    requests, finished = [], []
    for prompt, new_tokens, steps_until_the_next in jobs:
        if -(-(len(prompt) + new_tokens - 1) // page_size) > num_pages:
            with pytest.raises(ValueError, match="must fit the pool"):
                batcher.submit(prompt, new_tokens)
            continue
        requests.append(batcher.submit(prompt, new_tokens))
        for _ in range(steps_until_the_next):
            finished += batcher.step()
            check_pages(batcher)
    while batcher.waiting or batcher.running:
        steps = batcher.num_steps
        finished += batcher.step()
        assert batcher.num_steps == steps + 1  # every step moves someone
        check_pages(batcher)
    assert set(finished) == set(requests)
    assert pool.num_free == num_pages
    for request in requests:
        assert request.tokens == continued(request.prompt, request.max_new_tokens)
        if not request.num_evictions:
            stored = len(request.tokens) - 1
            assert request.num_reused + request.num_computed == stored


@given(st.lists(st.tuples(st.sampled_from("take release publish find"), st.integers(0, 7))))
def test_no_page_is_lost_or_allocated_twice(operations):
    pool = PagePool(6, page_size=2)
    held, published = [], {}
    for operation, number in operations:
        if operation == "take":
            free, pages = pool.num_free, pool.take(number)
            assert (pages is None) == (number > free)
            if pages is not None:
                assert not {page for owned in held for page in owned} & set(pages)
                held.append(pages)
                published = {k: page for k, page in published.items() if page not in pages}
        elif operation == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif operation == "publish" and held:
            pages = held[number % len(held)]
            key = bytes([number])
            if pages and pages[0] not in published.values():
                pool.publish(pages[0], key)
                published.setdefault(key, pages[0])
        elif operation == "find":
            keys = [bytes([number]), bytes([(number + 1) % 8])]
            pages = pool.find(keys)
            expected = [published[key] for key in keys if key in published]
            assert pages == (expected if keys[0] in published else [])
            held.append(pages)
        for page in range(6):
            assert pool.users[page] == sum(pages.count(page) for pages in held)
        assert pool.num_free == pool.users.count(0)
    for pages in held:
        pool.release(pages)
    assert pool.num_free == 6


def test_a_page_without_users_cannot_be_released():
    pool = PagePool(3, page_size=2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="pages must be in use, got page 0, which is free"):
        pool.release(pages)


def test_free_pages_stay_cached_until_they_are_reused():
    pool = PagePool(3, page_size=2)
    first, second = pool.take(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([first, second])
    assert pool.find([b"first", b"second", b"third"]) == [first, second]
    pool.release([first, second])
    pool.take(2)  # the third page, and the one freed first: the end of the prefix
    assert pool.find([b"first", b"second"]) == [first]


def test_pages_are_cached_once_they_are_full():
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    batcher = echo_batcher(num_pages=8, page_size=2, max_requests=1, max_step_tokens=3)
    batcher.submit(prompt, 1)
    for full in (1, 3, 4):
        batcher.step()
        pages = batcher.pool.find(page_keys(prompt, 2))
        assert len(pages) == full
        batcher.pool.release(pages)


def test_keys_cover_all_tokens_before_their_end():
    keys = list(page_keys([1, 2, 3, 4, 5], 2))
    assert len(keys) == len(set(keys)) == 2
    assert list(page_keys([1, 2, 3, 4], 2)) == keys
    assert list(page_keys([9, 2, 3, 4], 2))[1] != keys[1]
    assert next(page_keys([1, 2, 9], 2)) == keys[0]


def echo_batcher(num_pages, page_size=2, **limits):
    return Batcher(EchoModel(num_pages, page_size), PagePool(num_pages, page_size), **limits)


def run_to_the_end(batcher):
    while batcher.waiting or batcher.running:
        batcher.step()


def test_requests_wait_while_the_pool_is_full():
    batcher = echo_batcher(num_pages=4)
    requests = [batcher.submit([number] * 5, 4) for number in range(3)]
    batcher.step()
    assert batcher.running == requests[:1]
    assert list(batcher.waiting) == requests[1:]
    run_to_the_end(batcher)
    assert [request.num_evictions for request in requests] == [0, 0, 0]


def test_youngest_request_is_preempted_and_loses_no_tokens():
    batcher = echo_batcher(num_pages=6, max_requests=2)
    old, young, last = (batcher.submit([number] * 5, 7) for number in range(3))
    while not young.num_evictions:
        batcher.step()
    assert list(batcher.waiting) == [young, last]
    run_to_the_end(batcher)
    assert (old.num_evictions, young.num_evictions) == (0, 1)
    assert young.num_computed + young.num_reused > len(young.tokens) - 1
    for request in (old, young, last):
        assert request.tokens == continued(request.prompt, 7)


def test_long_prompt_does_not_delay_decodes():
    batcher = echo_batcher(num_pages=20, max_requests=2, max_step_tokens=4)
    short = batcher.submit([1], 6)
    batcher.step()
    long = batcher.submit([2] * 16, 1)
    for generated in range(2, 6):
        batcher.step()
        assert len(short.generated) == generated
    assert long.num_cached == 4 * 3


BAD_REQUESTS = {
    "never-fits": ([1] * 8, 2, r"pool of 4 pages of 2 tokens, got 8 \+ 2 tokens, which need 5"),
    "empty": ([], 2, "prompt must have a token"),
    "no-tokens": ([1], 0, "max_new_tokens be at least 1, got 1 tokens and 0"),
}


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS
)
def test_requests_that_cannot_be_served_are_refused(prompt, new_tokens, message):
    batcher = echo_batcher(num_pages=4)
    with pytest.raises(ValueError, match=message):
        batcher.submit(prompt, new_tokens)
    assert not batcher.waiting


def test_step_limit_below_the_number_of_requests_is_refused():
    with pytest.raises(ValueError, match="max_step_tokens must be at least max_requests, 8"):
        echo_batcher(4, max_requests=8, max_step_tokens=7)


def tiny_batcher(num_pages, device="cpu", **limits):
    return Batcher(TinyModel(num_pages, 16, device), PagePool(num_pages, 16), **limits)


def test_batched_requests_get_the_same_tokens_as_alone():
    prompts = [list(PREFACE[start : start + 40]) for start in (0, 10, 20)]
    batcher = tiny_batcher(num_pages=9)
    together = [batcher.submit(prompt, 16) for prompt in prompts]
    run_to_the_end(batcher)
    assert sum(request.num_evictions for request in together)
    for prompt, request in zip(prompts, together, strict=True):
        loner = tiny_batcher(num_pages=9)
        alone = loner.submit(prompt, 16)
        run_to_the_end(loner)
        assert request.tokens == alone.tokens


def test_cached_prefix_is_not_computed_again():
    batcher = tiny_batcher(num_pages=16)
    first = batcher.submit(list(PREFACE), 4)
    run_to_the_end(batcher)
    again = batcher.submit(list(PREFACE), 4)
    run_to_the_end(batcher)
    assert again.tokens == first.tokens
    assert again.num_reused == len(PREFACE) // 16 * 16
    assert again.num_computed == first.num_computed - again.num_reused


def test_tokens_depend_on_the_rows_in_the_cache():
    """Without this, the tests above would prove nothing."""
    batcher = tiny_batcher(num_pages=8)
    right = batcher.submit(list(PREFACE[:64]), 16)
    run_to_the_end(batcher)
    batcher.model.latents.data[right.pages[0]] = 0
    wrong = batcher.submit(list(PREFACE[:64]), 16)  # finds the first three pages
    run_to_the_end(batcher)
    assert wrong.num_reused == 48
    assert wrong.tokens != right.tokens


def test_the_example_runs(capsys):
    main()
    printed = capsys.readouterr().out
    assert "same tokens together as alone: 6 of 6 requests" in printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_example_serves_from_cuda_graphs():
    batcher = tiny_batcher(9, "cuda")
    requests = [batcher.submit(list(PREFACE[start : start + 40]), 16) for start in (0, 10, 20)]
    run_to_the_end(batcher)
    assert sum(request.num_evictions for request in requests)
    assert [len(request.generated) for request in requests] == [16] * 3
    assert batcher.pool.num_free == 9
