"""Records of selections that vLLM writes, on the CPU: whole engines' steps, and a training.

Blocks, requests, prefix hits and preemptions are those of vLLM's own scheduler.
"""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; .ci/run installs it", allow_module_level=True)

from vllm.config import KVTransferConfig, ParallelConfig, SpeculativeConfig
from vllm.distributed.kv_transfer import kv_transfer_state

from sparsemla.backends.records import read_record
from sparsemla.backends.vllm import indexer, nvidia
from test_vllm import (
    ON_CPU,
    TOPK,
    absorb,
    build_model,  # noqa: F401 - fixtures
    heads_of,
    model_config,  # noqa: F401
    one_rank,  # noqa: F401
    plain_vllm,  # noqa: F401
    published,
)
from test_vllm_host import Engine, prompts, without_a_gpu  # noqa: F401


def connector(folder, **extra):
    return KVTransferConfig(
        kv_connector="RecordsConnector",
        kv_connector_module_path="sparsemla.backends.vllm.recording",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"folder": str(folder), "model": "small", "host_gib": 1} | extra,
    )


class Recorded(Engine):
    """An engine that knows what was selected for each token, by the tokens up to it.

    A token that is computed again, after a preemption, keeps its first list.
    """

    def __init__(self, *args, monkeypatch):
        super().__init__(*args)
        self.lists, self.selected, self.answers = {}, {}, {}
        select, update = indexer.select_keys, self.scheduler.update_from_output

        def spied(q, weights, cache, metadata, topk, buffer, **given):
            select(q, weights, cache, metadata, topk, buffer, **given)
            self.lists[len(self.lists)] = buffer[: len(q), :topk].clone()

        def updated(*given):
            outputs = update(*given)
            for each in (each for some in outputs.values() for each in some.outputs):
                if each.finish_reason is not None:
                    self.answers[each.request_id] = each.kv_transfer_params
            return outputs

        for module in (indexer, nvidia):
            monkeypatch.setattr(module, "select_keys", spied)
        self.scheduler.update_from_output = updated

    def forward(self, out, names, computed):
        self.lists.clear()
        hidden = super().forward(out, names, computed)
        for layer, lists in self.lists.items():
            row = 0
            for name in names:
                tokens = self.tokens[name] + out.scheduled_spec_decode_tokens.get(name, [])
                for end in range(computed[name], computed[name] + out.num_scheduled_tokens[name]):
                    key = name, layer, *tokens[: end + 1]
                    self.selected.setdefault(key, lists[row])
                    row += 1
        return hidden

    def expected(self, name, layer, first):
        """The lists of a finished request, from a position on."""
        tokens = self.tokens[name]
        found = [
            self.selected[name, layer, *tokens[: at + 1]] for at in range(len(tokens) - 1)[first:]
        ]
        return torch.stack(found)


def serve(engine, requests):
    """Serve requests, each added before a step of its own, until all have finished."""
    waiting, step = dict(requests), 0
    while waiting or engine.scheduler.has_requests():
        for name, (at, prompt, length) in list(waiting.items()):
            if at <= step:
                del waiting[name]
                engine.add(name, prompt, length)
        engine.step()
        step += 1
    engine.connector.kv_connector.recorder.wait()


def check(engine, name, layers=(0, 1)):
    """The record of a request, which must have what was selected."""
    record = read_record(engine.answers[name]["selection_record"])
    assert (record.model, record.topk, record.score_dtype) == ("small", TOPK, "float8_e4m3fn")
    assert record.first_position + record.num_tokens == len(engine.tokens[name]) - 1
    assert sorted(record.selections) == list(layers)
    for place, layer in enumerate(layers):
        found = engine.expected(name, place, record.first_position)
        assert torch.equal(record.selections[layer], found[:, : record.selections[layer].shape[1]])
        assert (found[:, record.selections[layer].shape[1] :] == -1).all()
    return record


@pytest.fixture
def recorded(build_model, model_config, monkeypatch, tmp_path):
    """Makes an engine that writes records."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)

    def make(dtype, num_blocks, *, nvidia_class_runs=False, drafts=0, **extra):
        speculative = None
        if drafts:
            speculative = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                prompt_lookup_max=2,
                target_model_config=model_config,
                target_parallel_config=ParallelConfig(),
            )
        config, model = build_model(
            nvidia_class_runs,
            dtype,
            heads_of(nvidia_class_runs),
            kv_transfer_config=connector(tmp_path / "records", **extra),
            speculative_config=speculative,
        )
        model.load_weights(published(config).items())
        absorb(config)
        return Recorded(config, model, num_blocks, monkeypatch=monkeypatch)

    yield make
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    if agent is not None:
        agent.shutdown()


@ON_CPU
def test_a_record_has_what_was_selected(recorded):
    """In chunks, beside other requests, behind cached prefixes, and computed again."""
    engine = recorded("fp8_ds_mla", num_blocks=6)
    first, second, third, fourth = prompts(4, 150, shared=128)
    serve(
        engine,
        {
            "a": (3, first, 50),
            "b": (7, second, 60),
            "c": (9, third[:70], 40),
            "d": (73, fourth, 12),
            "short": (0, third[80:100], 5),
            "at/once": (0, third[100:130], 1),
        },
    )
    assert engine.seen["preempted"] > 0
    firsts = {name: check(engine, name).first_position for name in engine.answers}
    assert len(firsts) == 6
    assert (firsts["a"], firsts["d"]) == (0, 128)
    recorder = engine.connector.kv_connector.recorder
    assert (recorder.used, recorder._held, recorder._lists) == (0, {}, {})


@ON_CPU
def test_rejected_drafts_are_not_recorded(recorded):
    engine = recorded("fp8_ds_mla", num_blocks=16, drafts=2)
    first, second = prompts(2, 140)
    serve(engine, {"a": (0, first, 40), "b": (5, second, 30)})
    assert min(engine.seen[what] for what in ("accepted", "rejected")) > 1
    for name in "ab":
        assert check(engine, name).first_position == 0
