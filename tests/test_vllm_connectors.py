"""vLLM's KV connectors over this package's caches, on the CPU.

vLLM's scheduler, its connectors and its model run; only the copies between GPU and host are stood
in for. What a request reads from a connector must give the bits of what it would have computed.
"""

import warnings

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from safetensors.torch import load_file
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from sparsemla.backends.vllm import settings
from test_vllm import (
    ON_CPU,
    PAGE_SIZE,
    absorb,
    build_model,  # noqa: F401 - fixtures
    config,  # noqa: F401
    heads_of,
    model_config,  # noqa: F401
    one_rank,  # noqa: F401
    plain_vllm,  # noqa: F401
    published,
)
from test_vllm_host import Engine, prompts, without_a_gpu  # noqa: F401


class Copies(OffloadingWorker):
    """Stands in for vLLM's copies between GPU and pinned memory: at once, byte for byte."""

    def __init__(self, spec, caches):
        self.caches, self.pages, self.done = caches, {}, []
        self.blocks_per_chunk = spec.blocks_per_chunk
        self.stored = self.loaded = 0

    def views(self, gpu):
        """Bytes of the blocks that a transfer names, a list for each of these blocks."""
        found, blocks = [], list(map(int, gpu.block_ids))
        for count, refs in zip(gpu.group_sizes, self.caches.group_data_refs, strict=True):
            for block in blocks[:count]:
                found.append(
                    [
                        self.caches.tensors[ref.tensor_idx].tensor[block][: ref.page_size_bytes]
                        for ref in refs
                    ]
                )
            blocks = blocks[count:]
        return found

    def submit_store(self, job_id, src_spec, dst_spec):
        for views, chunk in zip(self.views(src_spec), map(int, dst_spec.block_ids), strict=True):
            self.pages[chunk] = [view.clone() for view in views]
            self.stored += 1
        self.done.append(TransferResult(job_id, True, None, None))
        return True

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        for views, chunk in zip(self.views(dst_spec), map(int, src_spec.block_ids), strict=True):
            for view, page in zip(views, self.pages[chunk], strict=True):
                view.copy_(page)
            self.loaded += 1
        self.done.append(TransferResult(job_id, True, None, None))
        return True

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        pass


class CopiesSpec(CPUOffloadingSpec):
    """vLLM's offloading to host memory, with :class:`Copies`."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = Copies(self, kv_caches)
        return self._worker


@pytest.fixture
def engine(build_model, monkeypatch):
    """Makes an engine with a connector or none, always of the same weights."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)

    def make(transfer, dtype="fp8_ds_mla", nvidia_class_runs=False, num_blocks=16):
        found, model = build_model(
            nvidia_class_runs, dtype, heads_of(nvidia_class_runs), kv_transfer_config=transfer
        )
        model.load_weights(published(found).items())
        absorb(found)
        return Engine(found, model, num_blocks)

    yield make
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    if agent is not None:
        agent.shutdown()


def serve(engine, name, prompt, count):
    """All tokens of a request, its prompt included."""
    engine.add(name, prompt, count)
    for _ in range(500):
        if not engine.scheduler.has_unfinished_requests():
            return engine.tokens[name]
        engine.step()
    raise AssertionError(f"{name} is still running")


def transfer(name, **extra):
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )  # fmt: skip


@ON_CPU
@pytest.mark.parametrize(
    ("dtype", "nvidia_class_runs"),
    [("fp8_ds_mla", False), ("auto", True)],
    ids=["rows of 656 bytes, portable", "bfloat16, NVIDIA"],
)
def test_pages_that_come_back_from_the_host_give_the_same_tokens(engine, dtype, nvidia_class_runs):
    """Rows and index keys: the GPU's pages are overwritten before they are read back."""
    first, second = prompts(2, 3 * PAGE_SIZE + 20)
    plain = engine(None, dtype, nvidia_class_runs)
    expected = serve(plain, "plain", first, 20)
    made = engine(
        transfer(
            "OffloadingConnector",
            spec_name="CopiesSpec",
            spec_module_path=__name__,
            cpu_bytes_to_use=1 << 26,
        ),
        dtype,
        nvidia_class_runs,
    )
    assert serve(made, "first", first, 20) == expected
    serve(made, "other", second, 20)
    worker = made.connector.kv_connector.connector_worker.worker
    assert worker.stored >= 6
    assert made.scheduler.reset_prefix_cache()
    for tensor in worker.caches.tensors:
        tensor.tensor.fill_(85)
    made.seen.clear()
    assert serve(made, "again", first, 20) == expected
    assert (worker.loaded, made.seen["hits"]) == (3, 1)


@ON_CPU
def test_vllms_example_of_a_connector_writes_no_index_keys(engine, tmp_path, monkeypatch):
    """And of a prompt in chunks one chunk's rows. So a start with it is refused; here it is not."""
    monkeypatch.setattr(settings, "EXAMPLE_CONNECTOR", None)
    made = engine(transfer("ExampleConnector", shared_storage_path=str(tmp_path)))
    for layer in made.config.compilation_config.static_forward_context.values():
        layer.use_direct_call = False  # as on GPUs, where vLLM's op calls the connector
    (prompt,) = prompts(1, 3 * PAGE_SIZE + 20)
    serve(made, "first", prompt, 2)
    written = sorted({path.stem for path in tmp_path.rglob("*.safetensors")})
    layers = made.builders.keys()
    assert written == sorted(name for name in layers if "indexer" not in name)
    assert any("indexer" in name for name in layers)
    found = [load_file(path)["kv_cache"] for path in tmp_path.rglob("*.safetensors")]
    assert {(*rows.shape, rows.dtype) for rows in found} == {(PAGE_SIZE, 656, torch.uint8)}
    assert made.scheduler.reset_prefix_cache()
    with pytest.raises(FileNotFoundError, match=r"indexer"):
        serve(made, "again", prompt, 2)
