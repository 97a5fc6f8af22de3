"""Records of selections that vLLM writes, on the CPU: whole engines' steps, and a training.

Blocks, requests, prefix hits and preemptions are those of vLLM's own scheduler.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from vllm.config import (
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.mla import index_group
from vllm.v1.core.sched.output import SchedulerOutput

from sparsemla.backends.recorder import BLOCK
from sparsemla.backends.records import read_record
from sparsemla.backends.transformers import enable
from sparsemla.backends.vllm import indexer, nvidia, recording, register, settings
from sparsemla.backends.vllm import recorded as selected
from sparsemla.backends.vllm.recorded import recorded_layers
from sparsemla_lab.testing.cases import Draw
from test_vllm import (
    CONFIG,
    MAX_TOKENS,
    ON_CPU,
    TOPK,
    Batch,
    InOrder,
    absorb,
    build_model,  # noqa: F401 - fixtures
    config,  # noqa: F401
    engine_config,
    heads_of,
    model_config,  # noqa: F401
    one_rank,  # noqa: F401
    plain_vllm,  # noqa: F401
    published,
    selecting,
)
from test_vllm_host import Engine, planned, prompts, without_a_gpu  # noqa: F401


def connector(records, **extra):
    return KVTransferConfig(
        kv_connector="RecordsConnector",
        kv_connector_module_path="sparsemla.backends.vllm.recording",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"folder": str(records), "model": "small", "host_gib": 1} | extra,
    )


class Recorded(Engine):
    """An engine that knows what was selected for each token, by the tokens up to it.

    A token that is computed again, after a preemption, keeps its first list.
    """

    def __init__(self, *args, monkeypatch):
        super().__init__(*args)
        self.lists, self.selected, self.hidden, self.answers = {}, {}, {}, {}
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
        row = 0
        for name in names:
            tokens = self.tokens[name] + out.scheduled_spec_decode_tokens.get(name, [])
            for end in range(computed[name], computed[name] + out.num_scheduled_tokens[name]):
                self.hidden.setdefault((name, *tokens[: end + 1]), hidden[row])
                for layer, lists in self.lists.items():
                    self.selected.setdefault((name, layer, *tokens[: end + 1]), lists[row])
                row += 1
        return hidden

    def expected(self, name, layer, first):
        """The lists of a finished request, from a position on."""
        tokens = self.tokens[name]
        found = [
            self.selected[name, layer, *tokens[: at + 1]] for at in range(len(tokens) - 1)[first:]
        ]
        return torch.stack(found)

    def log_probabilities(self, name, first):
        """Of the tokens of a request from a position on, as they were sampled."""
        tokens = self.tokens[name]
        rows = torch.stack([self.hidden[name, *tokens[:at]] for at in range(first, len(tokens))])
        logits = rows.float() @ self.model.lm_head.weight.float().T
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[first:])[:, None])[:, 0]


def serve(engine, requests, idle=0):
    """Serve requests, each added before a step of its own, until all have finished.

    Args:
        engine: of a worker.
        requests: when they come, their prompts, and how many tokens they want.
        idle: a dummy step behind every so many; 0 for none.
    """
    waiting, step = dict(requests), 0
    while waiting or engine.scheduler.has_requests():
        if idle and step % idle == 0:
            engine.dummy()
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

    def make(dtype, num_blocks, *, drafts=0, model=None, **extra):
        speculative, changes = None, {} if model is None else {"model_config": model}
        if drafts:
            speculative = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                prompt_lookup_max=2,
                target_model_config=model_config,
                target_parallel_config=ParallelConfig(),
            )
        config, model = build_model(
            False,
            dtype,
            kv_transfer_config=connector(tmp_path / "records", **extra),
            speculative_config=speculative,
            **changes,
        )
        if changes:
            draw = Draw(0)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(draw.normal(*weight.shape) * weight.shape[-1] ** -0.5)
        else:
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
        idle=4,
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


@ON_CPU
def test_layers_that_share_a_selection_have_one_list(recorded, tmp_path, monkeypatch):
    fields = CONFIG | {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 4,
        "index_topk_pattern": "FSFS",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    for function in ("current_stream", "_create_side_stream", "_create_event"):
        monkeypatch.setattr(index_group, function, lambda *arguments: InOrder())
    engine = recorded("fp8_ds_mla", num_blocks=16, model=model)
    serve(engine, {"a": (0, prompts(1, 150)[0], 4)})
    check(engine, "a", layers=(0, 2))


@ON_CPU
def test_over_the_limit_a_request_is_refused_by_name(recorded):
    """The longest waits behind others: one that fits is recorded."""
    block = BLOCK * 2 * TOPK * 2  # of two layers
    engine = recorded("fp8_ds_mla", num_blocks=16, host_gib=2 * block / 2**30)
    first, second = prompts(2, 150)
    serve(engine, {"long": (0, first, 30), "short": (0, second[:20], 3)})
    check(engine, "short")
    with pytest.raises(ValueError, match=r"no record of .*long: host_gib must be larger than 1.5"):
        read_record(engine.answers["long"]["selection_record"])
    serve(engine, {"later": (0, second, 4)})
    check(engine, "later")


@ON_CPU
def test_records_are_written_when_nothing_steps_any_more(recorded):
    engine = recorded("fp8_ds_mla", num_blocks=16)
    engine.add("a", prompts(1, 150)[0], 3)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    with pytest.raises(FileNotFoundError, match="must be a record of an engine, found no"):
        check(engine, "a")
    recording.write_records(None, list(engine.answers.values()))
    record = check(engine, "a")
    engine.step()  # the scheduler tells of the end
    engine.connector.kv_connector.recorder.wait()
    assert check(engine, "a").to_bytes() == record.to_bytes()


@ON_CPU
def test_another_connector_writes_no_records(monkeypatch):
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    with pytest.raises(ValueError, match="must have RecordsConnector, got object"):
        recording.write_records(None, [])


@ON_CPU
@pytest.mark.parametrize("nvidia_class_runs", [False, True], ids=["portable", "NVIDIA"])
def test_one_rank_records_the_layers_of_the_model(
    build_model, tmp_path, monkeypatch, nvidia_class_runs
):
    """Not those of a draft model, nor without the connector."""
    fields = CONFIG | {
        "architectures": ["DeepseekV32MTPModel"],
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    draft = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    speculative = SimpleNamespace(
        num_speculative_tokens=3,
        parallel_drafting=False,
        enable_adaptive_verification=False,
        draft_model_config=draft,
        method="mtp",
    )

    transfer = connector(tmp_path)

    def layers(*arguments, transfer=transfer):
        heads = heads_of(nvidia_class_runs)
        made, _ = build_model(
            nvidia_class_runs, "fp8_ds_mla", heads, *arguments, kv_transfer_config=transfer
        )
        return list(recorded_layers(made))

    found = layers()
    assert [layer_idx for layer_idx, *_ in found] == [0, 1]
    for _, name, layer in found:
        assert name == layer.prefix
        assert (layer.selections.dtype, layer.selections.shape) == (torch.uint16, (64, TOPK))
    assert layers(draft, speculative) == []
    assert layers(transfer=None) == []
    monkeypatch.setattr(selected, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    assert layers() == []


def test_the_nvidia_class_keeps_its_selection(config, monkeypatch):
    kept = torch.full((MAX_TOKENS, 2, TOPK), 7, dtype=torch.uint16)
    monkeypatch.setattr(nvidia.IndexCache, "selections", kept[:, 1], raising=False)
    *_, chosen = selecting(config, Batch(Draw(0), [1, 5], [300, 5]))
    expected = torch.where(chosen[:6] < 0, 65535, chosen[:6])
    assert torch.equal(kept[:6, 1].int(), expected)
    assert (kept[:, 0].int() == 7).all()
    assert (kept[6:].int() == 7).all()


@ON_CPU
def test_a_rank_without_recorded_layers_does_nothing(build_model, tmp_path, monkeypatch):
    monkeypatch.setattr(selected, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    config, _ = build_model(False, "auto", kv_transfer_config=connector(tmp_path / "records"))
    made = recording.RecordsConnector(config, KVConnectorRole.WORKER, planned(config))
    made.register_kv_caches({})
    made.bind_connector_metadata(recording.RecordsMetadata({"a": 5}))
    made.start_load_kv(None, request_ids=["a"])
    made.finish_forward()
    made.wait_for_save()
    made.unregister_kv_caches()
    made.shutdown()
    assert not (tmp_path / "records").exists()


@ON_CPU
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_rows_of_a_batch_are_those_of_its_requests(build_model, tmp_path, monkeypatch, captured):
    """Requests of few tokens between others, padding, and lengths that only the device has."""
    config, _ = build_model(False, "auto", kv_transfer_config=connector(tmp_path))
    made = recording.RecordsConnector(config, KVConnectorRole.WORKER, planned(config))
    made.register_kv_caches({})
    counts = {"few": 2, "a": 3, "b": 1, "other few": 1, "c": 2}
    ends = {"few": 9, "a": 300, "b": 200, "other few": TOPK, "c": 500}
    lists, row = {}, 0
    for name, count in counts.items():
        found = torch.stack(
            [Draw(row + i).permutation(ends[name] - 9)[:TOPK] for i in range(count)]
        )
        lists[name] = found.sort(-1)[0].int() if ends[name] > TOPK else None
        for place in range(2):
            if lists[name] is not None:
                made.copies.buffer[row : row + count, place] = (lists[name] + place).to(
                    torch.uint16
                )
        row += count
    bound = 4  # drafts that were rejected, as the scheduler does not know yet
    new = [
        SimpleNamespace(
            req_id=each,
            num_computed_tokens=ends[each] - counts[each],
            prefill_token_ids=[1] * ends[each],
        )
        for each in ("few", "a")
    ]
    later = ["b", "other few", "c"]
    computed = [ends[name] - counts[name] + bound * (name == "c") for name in later]
    out = SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=later, num_computed_tokens=computed),
    )
    name = next(name for _, name, _ in recorded_layers(config))
    lens = torch.tensor([*ends.values(), 0, 0])  # of a captured batch
    metadata = {name: SimpleNamespace(seq_lens=lens)}
    context = SimpleNamespace(attn_metadata=None if captured else metadata)
    given = {"attn_metadata": metadata} if captured else {}
    made.bind_connector_metadata(recording.RecordsMetadata({}))
    resume, resumed = made.recorder.resume, []
    monkeypatch.setattr(
        made.recorder, "resume", lambda *each: resumed.append(each) or resume(*each)
    )
    made.start_load_kv(context, request_ids=list(counts), scheduler_output=out, **given)
    assert made.step.runs == [(2, 6), (7, 9)]
    assert resumed == [("few", 9), ("a", 300)]  # nothing is known of them yet
    made.finish_forward()
    made.wait_for_save()
    lens.zero_()
    answers = [{"request": each, "num_tokens": end + 1} for each, end in ends.items()]
    for each in answers:
        made.recorder.finish(**each)
    made.recorder.wait()
    for each, found in lists.items():
        record = read_record(made.recorder.path(each))
        assert (record.first_position, record.num_tokens) == (
            ends[each] - counts[each],
            counts[each],
        )
        for place in range(2):
            if found is not None:
                assert torch.equal(record.selections[place], found + place)
            else:
                assert record.selections[place].amax(1).tolist() == list(
                    range(ends[each] - counts[each], ends[each])
                )
    made.shutdown()


@ON_CPU
def test_a_stage_names_its_files(build_model, tmp_path, monkeypatch):
    stage = SimpleNamespace(rank_in_group=1, world_size=4)
    monkeypatch.setattr(recording, "get_pp_group", lambda: stage)
    config, _ = build_model(False, "auto", kv_transfer_config=connector(tmp_path))
    made = recording.RecordsConnector(config, KVConnectorRole.WORKER, planned(config))
    made.register_kv_caches({})
    assert made.recorder.stage == (1, 4)
    made.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_of_captured_steps():
    """Each step overwrites the lists of the one before while those may still be copied."""
    lists = torch.empty(3, 32, 2048, dtype=torch.int32, device="cuda")
    buffer = torch.zeros(64, 3, 2048, dtype=torch.uint16, device="cuda")
    layers = [SimpleNamespace(selections=buffer[:, place]) for place in range(3)]
    lens, graph = torch.empty(8, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, chosen in zip(layers, lists, strict=True):
            selected.keep_selection(layer, chosen)
    copies, found = recording.Copies(buffer), []
    for step in range(200):
        values = torch.arange(step, step + 3 * 32 * 2048, device="cuda", dtype=torch.int32)
        lists.copy_((values % 65000).view_as(lists))
        lists[:, :, -1] = -1
        lens.fill_(step)
        graph.replay()
        found.append(copies.start([(0, 10), (12, 32)], lens[:5]))
        lens.fill_(-1)
        copies.hold_back()
    for step, (rows, lengths, ready) in enumerate(found):
        ready()
        values = torch.arange(step, step + 3 * 32 * 2048, dtype=torch.int32) % 65000
        expected = values.view(3, 32, 2048).transpose(0, 1).clone()
        expected[:, :, -1] = 65535
        assert torch.equal(rows.int(), torch.cat([expected[:10], expected[12:]]))
        assert lengths.tolist() == [step] * 5


REFUSED = {
    "indexer": ({"indexer": False}, "VLLM_PLUGINS must name sparsemla_indexer"),
    "runner": ({"runner": False}, "VLLM_USE_V2_MODEL_RUNNER must not be 0"),
    "pcp": ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-.* got 2"),
    "dbo": ({"parallel_config__enable_dbo": True}, "--enable-dbo and --ubatch-size must be off"),
    "drafts": (
        {"speculative_config": SimpleNamespace(
            attention_backend=None, draft_model_config=None, enable_adaptive_verification=True
        )},
        "enable_adaptive_verification must be off",
    ),
    "model": ({"architectures": ["DeepseekV4ForCausalLM"]}, "must be one of DeepseekV32For"),
    "no folder": ({"without": "folder"}, "must have folder, model, host_gib, got host_gib, model"),
    "unknown": ({"gib": 3}, "must have folder, model, host_gib, got folder, gib, host_gib, model"),
    "folder": ({"folder": 3}, "folder .* must be a string that is not empty, got 3"),
    "name": ({"model": ""}, "model .* must be a string that is not empty, got ''"),
    "host_gib": ({"host_gib": True}, "host_gib .* must be a positive number, .* got True"),
    "no memory": ({"host_gib": 0}, "host_gib .* must be a positive number, .* got 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_with_records_stop_the_start(
    model_config, plain_vllm, monkeypatch, name
):
    changes, reason = REFUSED[name]
    changes = dict(changes)
    extra = {
        key: changes.pop(key) for key in ("folder", "model", "host_gib", "gib") if key in changes
    }
    register()
    monkeypatch.setattr(settings, "indexer_is_active", lambda: changes.get("indexer", True))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", changes.get("runner", True))
    monkeypatch.setattr(
        ModelConfig, "architectures", changes.get("architectures", model_config.architectures)
    )
    config = engine_config(model_config)
    config.kv_transfer_config = connector("records", **extra)
    config.kv_transfer_config.kv_connector_extra_config.pop(changes.get("without"), None)
    for where, value in changes.items():
        part, _, field = where.partition("__")
        if part in vars(config):
            monkeypatch.setattr(getattr(config, part) if field else config, field or part, value)
    with pytest.raises(ValueError, match=f"sparsemla: .*{reason}"):
        settings.refuse(config)


def test_records_alone_are_served(model_config, plain_vllm, monkeypatch):
    """With vLLM's attention, too: only the indexer must be this package's."""
    register()
    monkeypatch.setattr(settings, "indexer_is_active", lambda: True)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    config = engine_config(model_config)
    config.kv_transfer_config = connector("records")
    settings.refuse(config)
    both = [{"kv_connector": name} for name in ("NixlConnector", "RecordsConnector")]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"connectors": both},
    )
    with pytest.raises(ValueError, match="RecordsConnector must be the only KV connector"):
        settings.refuse(config)


@ON_CPU
def test_the_schedulers_side(build_model, tmp_path):
    config, _ = build_model(False, "auto", kv_transfer_config=connector(tmp_path))
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, planned(config))
    assert made.get_num_new_matched_tokens(None, 5) == (0, False)
    assert not made.requires_kv_delivery
    request = SimpleNamespace(request_id="a/b", num_tokens=9)
    held, answer = made.request_finished_all_groups(request, ([1],))
    path = str(tmp_path / "a%2Fb")
    assert (held, answer) == (False, {"selection_record": path, "request": "a/b", "num_tokens": 9})
    out = SchedulerOutput.make_empty()
    assert made.build_connector_meta(out).finished == {"a/b": 9}
    assert out.has_sync_kv_loads
    assert made.build_connector_meta(SchedulerOutput.make_empty()).finished == {}


@ON_CPU
def test_a_training_replays_what_vllm_selected(recorded):
    """With vLLM's selections the trainer's log-probabilities are nearer to those of the rollout."""
    engine = recorded("fp8_ds_mla", num_blocks=30)
    first, second = prompts(2, 150)
    serve(engine, {"a": (0, first, 30), "b": (2, second, 30)})
    fields = CONFIG | {"index_n_heads": engine.config.model_config.hf_config.index_n_heads}
    del fields["architectures"], fields["torch_dtype"]
    model = DeepseekV32ForCausalLM(DeepseekV32Config(**fields))
    model.load_state_dict(published(engine.config))
    differences = []
    with enable(model, training=True), torch.no_grad():
        for replayed in (False, True):
            found = []
            for name, prompt in (("a", first), ("b", second)):
                tokens, selections = engine.tokens[name], None
                if replayed:
                    record = read_record(engine.answers[name]["selection_record"])
                    about = {"model": "small", "topk": TOPK, "num_tokens": len(tokens) - 1}
                    selections = record.checked(**about)
                logits = model(torch.tensor([tokens[:-1]]), selections=selections).logits[0]
                answer = torch.tensor(tokens[len(prompt) :])[:, None]
                trained = logits[len(prompt) - 1 :].log_softmax(-1).gather(1, answer)[:, 0]
                found.append((trained - engine.log_probabilities(name, len(prompt))).abs())
            differences.append(torch.cat(found))
    own, replayed = differences
    assert replayed.mean() < own.mean() * 0.7
    assert replayed.max() < own.max() / 2
