"""examples/host_batching.py has the bits of examples/batching.py, at every step."""

import torch

import batching
import host_batching
from batching import Batcher, PagePool, serve
from host_batching import HostBatcher, HostModel
from tiny_model import TinyModel

PAGES, PAGE_SIZE = 17, 8
PROMPTS = [b"The lamp at Skerrow is lit", b"The lamp at Skerrow was lit by whom?", b"Which ships?"]


def logits_of(batcher, prompts):
    """Logits of all steps, and the requests."""
    steps, compute = [], batcher._logits

    def record(batch):
        logits = compute(batch)
        steps.append(logits.clone())
        return logits

    batcher._logits = record
    requests = serve(batcher, prompts)
    return steps, requests


def test_every_step_has_the_bits_of_rows_on_the_device(monkeypatch):
    """With shared prefixes and evictions; on a GPU, prompts attend by another kernel."""
    monkeypatch.setattr(batching, "NEW_TOKENS", 70)
    limits = {"max_requests": host_batching.MAX_REQUESTS}
    resident = Batcher(TinyModel(PAGES, PAGE_SIZE), PagePool(PAGES, PAGE_SIZE), **limits)
    steps, requests = logits_of(resident, PROMPTS)
    model = HostModel(PAGES, PAGE_SIZE)
    batcher = HostBatcher(model, PagePool(PAGES, PAGE_SIZE))
    ours, same = logits_of(batcher, PROMPTS)
    assert sum(request.num_evictions for request in requests) > 0
    assert sum(request.num_reused for request in requests) > 0
    assert len(steps) == len(ours) > 100
    for number, (expected, logits) in enumerate(zip(steps, ours, strict=True)):
        assert torch.equal(expected, logits), number
    assert [each.tokens for each in same] == [each.tokens for each in requests]
    stats = model.hot.stats()
    assert stats.misses > 0
    assert stats.hits > 0
    model.latents.close()


def test_the_program(capsys, monkeypatch):
    monkeypatch.setattr(batching, "NEW_TOKENS", 3)
    monkeypatch.setattr(host_batching, "QUESTIONS", host_batching.QUESTIONS[:2])
    host_batching.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("HostCache(fp8_ds_mla, 24 pages of 16 rows in each of 2 layers")
    assert lines[2] == "same tokens as with rows on the device: 2 of 2 requests"
