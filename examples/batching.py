"""Continuous batching without an engine: requests come and go, one planned step serves them all.

A request owns pages of the cache, page by page as it grows. Each step decodes one token for every
request that has its prompt behind it, and spends what is left of a budget of tokens on chunks of
prompts. Full pages are found again by the tokens in them, so that requests with a common start
share its pages. When the pages are used up, the youngest request gives its own back, waits, and is
computed again later: its tokens are the same.

Run ``python examples/batching.py``, or with ``--device cuda``: there, decode steps are CUDA graphs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sparsemla import DecodeRunner, Plan, plan_batch
from tiny_model import TinyModel


class PagePool:
    """Hands out page ids; several requests may use one page.

    A page without users is free, and keeps its content until it is handed out again, so that a
    later request may still find it.

    Args:
        num_pages: pages of the cache.
        page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.users = [0] * num_pages
        self._free = dict.fromkeys(range(num_pages))  # an ordered set, longest free first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_pages(self) -> int:
        return len(self.users)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages with one user each and their content forgotten, or None: too few."""
        if count > self.num_free:
            return None
        pages = list(itertools.islice(self._free, count))
        for page in pages:
            del self._free[page]
            self.users[page] = 1
            if page in self._key_of:
                del self._page_of[self._key_of.pop(page)]
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page. Ends of prompts are freed, and so forgotten, before starts.

        Raises:
            ValueError: a page has no user.
        """
        for page in reversed(pages):
            if self.users[page] == 0:
                raise ValueError(f"pages must be in use, got page {page}, which is free")
            self.users[page] -= 1
            if self.users[page] == 0:
                self._free[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a full page that will not be written again; the first of a key stays."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the first keys, up to one that is unknown; one more user for each."""
        known = itertools.takewhile(self._page_of.__contains__, keys)
        pages = [self._page_of[key] for key in known]
        for page in pages:
            self._free.pop(page, None)
            self.users[page] += 1
        return pages


def page_keys(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """A key for each full page: a hash of its tokens and of all that stand before them."""
    key = b""
    for end in range(page_size, len(tokens) + 1, page_size):
        page = np.array(tokens[end - page_size : end], np.int64)
        key = hashlib.sha256(key + page.tobytes()).digest()
        yield key


@dataclass(eq=False)
class Request:
    """A prompt and what becomes of it.

    Attributes:
        tokens: the prompt and the tokens generated so far.
        pages: of the cache, for ``tokens`` in order.
        num_cached: leading tokens whose rows are in the pages.
        num_published: leading pages that others can find.
        num_computed, num_reused: tokens that went through the model, and that it was spared.
        num_evictions: how often the pages were taken away.
        seconds: when it came, got its first token, and was finished.
    """

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_published: int = 0
    num_computed: int = 0
    num_reused: int = 0
    num_evictions: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_pending(self) -> int:
        """Tokens that must go through the model before there is a next one."""
        return len(self.tokens) - self.num_cached


class Model(Protocol):
    """What the batcher calls: writes the rows of the tokens ``[T]``, returns logits ``[T, n]``."""

    device: str

    def step(self, plan: Plan, token_ids: Tensor, **inputs: Tensor) -> Tensor: ...


class Batcher:
    """Serves requests first come, first served, with the pages of a pool.

    Args:
        model: with a cache of as many pages of the same size as the pool.
        pool: the pages.
        max_requests: most requests of a step.
        max_step_tokens: most tokens of a step; longer prompts take several steps.
        workspace_rows: of the plans of steps with prompts, for models that gather contexts.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        max_requests: int = 8,
        max_step_tokens: int = 64,
        workspace_rows: int | None = None,
    ) -> None:
        if max_step_tokens < max_requests:
            raise ValueError(
                f"max_step_tokens must be at least max_requests, {max_requests}, so that all can "
                f"decode; got {max_step_tokens}"
            )
        self.model, self.pool = model, pool
        self.max_requests, self.max_step_tokens = max_requests, max_step_tokens
        self.workspace_rows = workspace_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first, all older than those that wait
        self.num_steps = 0
        self._decode = DecodeRunner(
            model.step,
            self.inputs([], [0]),
            batch_sizes={*(2**i for i in range(max_requests.bit_length())), max_requests},
            max_pages_per_request=pool.num_pages,
            page_size=pool.page_size,
        )

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queue a request.

        Raises:
            ValueError: nothing to read or to write, or more than all pages can hold.
        """
        if not prompt or max_new_tokens < 1:
            raise ValueError(
                "prompt must have a token and max_new_tokens be at least 1, "
                f"got {len(prompt)} tokens and {max_new_tokens}"
            )
        needed = self._pages_for(len(prompt) + max_new_tokens - 1)  # the last one is not stored
        if needed > self.pool.num_pages:
            raise ValueError(
                f"prompt and new tokens must fit the pool of {self.pool.num_pages} pages of "
                f"{self.pool.page_size} tokens, got {len(prompt)} + {max_new_tokens} tokens, which "
                f"need {needed}"
            )
        request = Request(list(prompt), max_new_tokens, list(prompt))
        request.seconds.append(time.perf_counter())
        self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Move every request that has its turn; those that are finished."""
        batch = self._schedule()
        if not batch:
            return []
        self.num_steps += 1
        next_tokens = self._logits(batch).argmax(-1).tolist()
        finished = []
        for (request, num_tokens), token in zip(batch.items(), next_tokens, strict=True):
            request.num_cached += num_tokens
            request.num_computed += num_tokens
            self._publish(request)
            if request.num_pending:
                continue  # the prompt goes on
            request.tokens.append(token)
            if len(request.generated) == 1:
                request.seconds.append(time.perf_counter())
            if len(request.generated) == request.max_new_tokens:
                request.seconds.append(time.perf_counter())
                self.running.remove(request)
                self.pool.release(request.pages)
                finished.append(request)
        return finished

    def _schedule(self) -> dict[Request, int]:
        """Who brings how many tokens to this step, decodes first; all have pages for them."""
        batch: dict[Request, int] = {}
        left = self.max_step_tokens
        # Only decodes grow, the older first, and only younger requests give way: none in the batch.
        for request in sorted(self.running, key=lambda request: request.num_pending > 1):
            num_tokens = min(request.num_pending, left)
            if num_tokens and self._grow(request):
                batch[request] = num_tokens
                left -= num_tokens
        while left and self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            if not self._admit(request):
                break
            batch[request] = min(request.num_pending, left)
            left -= batch[request]
        return batch

    def _admit(self, request: Request) -> bool:
        """Move the first that waits to those that run, if there are pages for its tokens so far."""
        page_size = self.pool.page_size
        # One token is computed in any case: its logits are wanted.
        findable = (len(request.tokens) - 1) // page_size
        found = self.pool.find(itertools.islice(page_keys(request.tokens, page_size), findable))
        fresh = self.pool.take(self._pages_for(len(request.tokens)) - len(found))
        if fresh is None:
            self.pool.release(found)
            return False
        request.pages = found + fresh
        request.num_published = len(found)
        request.num_cached = len(found) * page_size
        request.num_reused += request.num_cached
        self.running.append(self.waiting.popleft())
        return True

    def _grow(self, request: Request) -> bool:
        """Get a running request pages for all its tokens; False if it was the one to give way.

        The oldest never gives way: alone, it fits the pool. So everyone is the oldest some day.
        """
        needed = self._pages_for(len(request.tokens)) - len(request.pages)
        while request in self.running:
            fresh = self.pool.take(needed)
            if fresh is not None:
                request.pages += fresh
                return True
            self._evict(self.running[-1])
        return False

    def _evict(self, request: Request) -> None:
        """Take the pages of a request away and let it wait as the first; its tokens stay."""
        self.running.remove(request)
        self.pool.release(request.pages)
        request.pages, request.num_cached, request.num_published = [], 0, 0
        request.num_evictions += 1
        self.waiting.appendleft(request)

    def _publish(self, request: Request) -> None:
        num_full = request.num_cached // self.pool.page_size
        if num_full > request.num_published:
            keys = itertools.islice(page_keys(request.tokens, self.pool.page_size), num_full)
            for page, key in zip(request.pages, keys, strict=False):
                self.pool.publish(page, key)
            request.num_published = num_full

    def _logits(self, batch: dict[Request, int]) -> Tensor:
        """Logits ``[B, n]`` behind the last token that each request brings."""
        query_lens = list(batch.values())
        seq_lens = [request.num_cached + n for request, n in batch.items()]
        page_table = torch.full((len(batch), self.pool.num_pages), -1, dtype=torch.int32)
        for row, request in zip(page_table, batch, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages)
        spans = zip(batch, seq_lens, strict=True)
        tokens = [
            token for request, end in spans for token in request.tokens[request.num_cached : end]
        ]
        page_table = page_table.to(self.model.device)
        inputs = self.inputs(list(batch), tokens)
        if max(query_lens) == 1:
            return self._decode.run(seq_lens, page_table, **inputs)
        plan = plan_batch(
            query_lens,
            seq_lens,
            page_table,
            page_size=self.pool.page_size,
            workspace_rows=self.workspace_rows,
        )
        logits = self.model.step(plan, **inputs)  # [T, n]
        return logits[plan.input_row_offsets[1:] - 1]

    def inputs(self, batch: Sequence[Request], tokens: Sequence[int]) -> dict[str, Tensor]:
        """What the model's step takes beside the plan."""
        return {"token_ids": torch.tensor(tokens, device=self.model.device)}

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)


NUM_PAGES, PAGE_SIZE, NEW_TOKENS = 24, 16, 24
PREFACE = b"You keep the lamp at Skerrow. Answer in a line, from the log book, and name the page.\n"
QUESTIONS = (
    b"When was the lamp first lit?",
    b"Who kept it before you came, and for how many winters did they stay?",
    b"What does the index of the log book leave out?",
    b"When was the lamp first lit, and by whom?",
    b"How long is a short glance?",
    b"Which ships passed in the fog of the third year? Name all, with their ports and flags.",
)


def serve(batcher: Batcher, prompts: Sequence[bytes]) -> list[Request]:
    """Serve prompts of which one comes every second step."""
    coming = deque(prompts)
    requests = []
    while coming or batcher.waiting or batcher.running:
        for _ in range(2):
            batcher.step()
        if coming:
            requests.append(batcher.submit(list(coming.popleft()), NEW_TOKENS))
    return requests


def report(requests: Sequence[Request]) -> Table:
    """A row for each request: its tokens, its pages, its time."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = "request prompt computed pages reused evicted first,s last,s tokens/s"
    for name in names.split():
        table.add_column(name, justify="right", no_wrap=True)
    for number, request in enumerate(requests):
        came, first, last = request.seconds
        counts = number, len(request.prompt), request.num_computed, len(request.pages)
        more = request.num_reused // PAGE_SIZE, request.num_evictions
        times = f"{first - came:.2f}", f"{last - came:.2f}"
        speed = len(request.generated) / (last - came)
        table.add_row(*map(str, (*counts, *more)), *times, f"{speed:.0f}")
    return table


def main(device: str = "cpu") -> None:
    """Serve the questions together, then each alone, and compare."""
    model = TinyModel(NUM_PAGES, PAGE_SIZE, device)
    prompts = [PREFACE + question for question in QUESTIONS]
    batcher = Batcher(model, PagePool(NUM_PAGES, PAGE_SIZE))
    began = time.perf_counter()
    together = serve(batcher, prompts)
    seconds = time.perf_counter() - began

    loners = [Batcher(model, PagePool(NUM_PAGES, PAGE_SIZE), max_requests=1) for _ in prompts]
    began = time.perf_counter()
    alone = [serve(loner, [prompt])[0] for loner, prompt in zip(loners, prompts, strict=True)]
    seconds_alone = time.perf_counter() - began

    same = [a.tokens == b.tokens for a, b in zip(together, alone, strict=True)]
    console = Console()
    console.print(report(together))
    for name, requests, steps, took in (
        ("together", together, batcher.num_steps, seconds),
        ("one by one", alone, sum(loner.num_steps for loner in loners), seconds_alone),
    ):
        computed = sum(request.num_computed for request in requests)
        generated = sum(len(request.generated) for request in requests)
        console.print(
            f"{name}: {steps} steps, {computed} tokens computed, {generated} generated, "
            f"{took:.2f} s, {generated / took:.0f} tokens/s"
        )
    console.print(f"same tokens together as alone: {sum(same)} of {len(same)} requests")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    main(parser.parse_args().device)
