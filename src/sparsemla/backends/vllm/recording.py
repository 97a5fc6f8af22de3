"""A KV connector of vLLM that writes a record of selections for each request.

It moves no KV: vLLM tells a connector when a forward pass begins and ends, which requests it has,
and when they finish. Layers keep their selections of a step (:mod:`.recorded`); behind the forward
pass the connector copies those that are not trivial to the host, on a stream of its own, and
:class:`sparsemla.backends.recorder.Recorder` does the rest. The next forward pass waits for the
copies on the GPU; the host never waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from sparsemla.backends.recorder import BLOCK, Recorder, Span, record_path
from sparsemla.backends.vllm.recorded import recorded_layers
from sparsemla.backends.vllm.settings import RECORDS_CONNECTOR, RecordsConfig
from sparsemla.backends.vllm.surface import RECORDING, check

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

LOGGER = init_logger("vllm.sparsemla")


@dataclass
class RecordsMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers in a step.

    Attributes:
        finished: tokens of the prompt and the answer of requests that have finished.
    """

    finished: dict[str, int]


@dataclass(frozen=True)
class Step:
    """A forward pass.

    Attributes:
        spans: of its requests.
        runs: rows of the batch to copy: begin and end of each run of them.
        seq_lens: int32 on the device, context and query of each request.
    """

    spans: list[Span]
    runs: list[tuple[int, int]]
    seq_lens: Tensor


class Copies:
    """Copies selections to the host behind a forward pass.

    Args:
        buffer: ``[max_num_batched_tokens, layers, topk]``.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        self.done: torch.cuda.Event | None = None

    def start(
        self, runs: Sequence[tuple[int, int]], seq_lens: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Begin to copy rows of the buffer.

        Returns:
            The rows of all runs, and the lengths, on the host, and a function that waits for them.
        """
        shape = sum(end - begin for begin, end in runs), *self.buffer.shape[1:]
        pinned = self.stream is not None
        rows = torch.empty(shape, dtype=self.buffer.dtype, pin_memory=pinned)
        lens = torch.empty(seq_lens.shape, dtype=seq_lens.dtype, pin_memory=pinned)
        if self.stream is None:
            self._copy(rows, runs, lens, seq_lens)
            return rows, lens, lambda: None
        # vLLM may change its tensor as soon as the step is over.
        seq_lens = seq_lens.clone()
        self.stream.wait_stream(torch.cuda.current_stream(self.buffer.device))
        with torch.cuda.stream(self.stream):
            self._copy(rows, runs, lens, seq_lens)
            self.done = torch.cuda.Event(blocking=True)
            self.done.record()
        seq_lens.record_stream(self.stream)
        return rows, lens, self.done.synchronize

    def _copy(
        self, rows: Tensor, runs: Sequence[tuple[int, int]], lens: Tensor, seq_lens: Tensor
    ) -> None:
        sizes = [end - begin for begin, end in runs]
        for part, (begin, end) in zip(rows.split(sizes), runs, strict=True):
            part.copy_(self.buffer[begin:end], non_blocking=True)
        lens.copy_(seq_lens, non_blocking=True)

    def hold_back(self) -> None:
        """Let what is launched from now on, and may overwrite the buffer, wait for the copies."""
        if self.done is not None:
            torch.cuda.current_stream(self.buffer.device).wait_event(self.done)


class RecordsConnector(KVConnectorBase_V1, SupportsHMA):
    """Records of selections for requests of models with this package's indexer.

    Its constructor takes :class:`RecordsConfig` from ``kv_connector_extra_config``. An answer has
    ``selection_record`` in its ``kv_transfer_params``: the path for
    :func:`sparsemla.backends.records.read_record`.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check(RECORDING, sys.modules[__name__])
        super().__init__(vllm_config, role, kv_cache_config)
        settings = RecordsConfig.of(vllm_config)
        if settings is None:
            raise ValueError(f"sparsemla: kv_connector must be {RECORDS_CONNECTOR}, got another")
        self.settings, self.folder = settings, Path(settings.folder)
        self.finished: dict[str, int] = {}
        self.recorder: Recorder | None = None
        self.copies: Copies | None = None
        self.name = ""
        self.step: Step | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: nothing leaves the engine."""
        return False

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """None: nothing is loaded."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Do nothing: blocks are vLLM's."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RecordsMetadata:
        """The requests that have finished since the last step."""
        # Otherwise vLLM would call start_load_kv behind the forward pass.
        scheduler_output.has_sync_kv_loads = True
        finished, self.finished = self.finished, {}
        return RecordsMetadata(finished)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Where the record will be; the blocks of the request are free at once."""
        name, num_tokens = request.request_id, request.num_tokens
        self.finished[name] = num_tokens
        return False, {
            "selection_record": str(record_path(self.folder, name)),
            "request": name,
            "num_tokens": num_tokens,
        }

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Allocate the tensor of all layers' selections, and start the recorder.

        Args:
            kv_caches: ignored.

        Raises:
            OSError: the folder cannot be made.
        """
        config = self._vllm_config
        layers = sorted(recorded_layers(config), key=lambda each: each[0])
        if not layers:
            return
        first, self.name = layers[0][2].selections, layers[0][1]
        (tokens, topk), about = first.shape, {"dtype": first.dtype, "device": first.device}
        del first
        for _, _, layer in layers:
            layer.selections = None
        torch.accelerator.empty_cache()  # what vLLM's profiling has counted
        buffer = torch.empty(tokens, len(layers), topk, **about)
        for place, (_, _, layer) in enumerate(layers):
            layer.selections = buffer[:, place]
        self.folder.mkdir(parents=True, exist_ok=True)
        stages, settings = get_pp_group(), self.settings
        self.copies = Copies(buffer)
        self.recorder = Recorder(
            self.folder,
            model=settings.model,
            topk=topk,
            layers=[layer_idx for layer_idx, _, _ in layers],
            dtype=buffer.dtype,
            limit=int(settings.host_gib * 2**30),
            stage=(stages.rank_in_group, stages.world_size),
            warn=LOGGER.warning,
        )
        LOGGER.info(
            "sparsemla: selections of %d layers are recorded to %s, %d bytes for a token behind "
            "the first %d of its sequence, at most %g GiB at a time; they take %.2f GiB of the GPU",
            len(layers),
            self.folder,
            self.recorder.block_bytes // BLOCK,
            topk,
            settings.host_gib,
            buffer.nbytes / 2**30,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Tell the recorder of requests that have finished, and which tokens a step has.

        Args:
            forward_context: has the metadata of a step that is not a whole captured graph.
            kwargs: ``request_ids`` in the order of the batch, ``scheduler_output``, and
                ``attn_metadata`` of a captured graph; nothing in a step without a batch.

        Raises:
            RuntimeError: a record could not be written.
        """
        metadata, recorder = self._get_connector_metadata(), self.recorder
        if recorder is None or not isinstance(metadata, RecordsMetadata):
            return
        for name, num_tokens in metadata.finished.items():
            recorder.finish(name, num_tokens)
        names = kwargs.get("request_ids")
        if names is None:
            return
        out: SchedulerOutput = kwargs["scheduler_output"]
        computed = dict(
            zip(
                out.scheduled_cached_reqs.req_ids,
                out.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for new in out.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            # Also a preempted request: it then has the tokens of its answer so far.
            recorder.resume(new.req_id, len(new.prefill_token_ids or ()))
        counts = [out.num_scheduled_tokens[name] for name in names]
        wanted = recorder.reserve(
            [
                (name, computed[name], computed[name] + n)
                for name, n in zip(names, counts, strict=True)
            ]
        )
        spans: list[Span] = []
        runs: list[tuple[int, int]] = []
        begin = copied = 0
        for name, count, each in zip(names, counts, wanted, strict=True):
            spans.append(Span(name, count, copied if each else None))
            if each:
                copied += count
                if runs and runs[-1][1] == begin:
                    runs[-1] = runs[-1][0], begin + count
                else:
                    runs.append((begin, begin + count))
            begin += count
        described = kwargs.get("attn_metadata") or forward_context.attn_metadata
        self.step = Step(spans, runs, described[self.name].seq_lens[: len(names)])

    def finish_forward(self) -> None:
        """Copy the selections of the step."""
        step, self.step = self.step, None
        if step is None or self.copies is None or self.recorder is None:
            return
        self.recorder.add(step.spans, *self.copies.start(step.runs, step.seq_lens))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: nothing is loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: no KV is moved."""

    def wait_for_save(self) -> None:
        """Hold the next forward pass back until this one's selections are copied."""
        if self.copies is not None:
            self.copies.hold_back()

    def unregister_kv_caches(self) -> None:
        """Wait for copies before vLLM's sleep mode takes the memory."""
        if self.recorder is not None:
            self.recorder.wait()

    def shutdown(self) -> None:
        """Write the records of requests that have finished."""
        if self.recorder is not None:
            self.recorder.close()


def write_records(worker: object, answers: Sequence[Mapping[str, Any]]) -> None:
    """Write the records of these answers now, and wait for them: for ``LLM.collective_rpc``.

    An engine in the caller's process takes no step behind the last answer, in which a worker would
    learn that its request has finished.

    Args:
        worker: of vLLM.
        answers: ``kv_transfer_params`` of each.

    Raises:
        RuntimeError: a record could not be written.
    """
    connector = get_kv_transfer_group()
    if not isinstance(connector, RecordsConnector):
        raise ValueError(
            f"--kv-transfer-config must have {RECORDS_CONNECTOR}, got {type(connector).__name__}"
        )
    if connector.recorder is None:
        return  # another rank records
    for answer in answers:
        connector.recorder.finish(answer["request"], answer["num_tokens"])
    connector.recorder.wait()
