"""Speed of ``enable`` in transformers: prefill and decode steps beside transformers' own attention.

The model is a DeepSeek-V3.2 of few layers with the true dims of attention, indexer and the MLP of
its first layers, in bfloat16. Its weights copy the token 37 positions back, so both sides must
generate the same tokens; a side that does not is not timed.

Needs a GPU with 80 GB. Run ``python benchmarks/transformers_bench.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from sparsemla.backends.transformers import enable
from sparsemla.backends.transformers.cache import CACHE
from sparsemla_lab.testing.models import copying_model

SIZES = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 4096,
}
"""Those of DeepSeek-V3.2, but for the vocabulary."""

THEIRS = "transformers"
FORMATS = ("bf16_576v512", "fp8_ds_mla")
CHUNK = 1024
"""Tokens of a forward of a prefill in pieces."""
WARM, TIMED = 3, 20
"""Decode steps before the time is taken, and of the time."""
ENOUGH_S = 1.0
"""A prefill that takes longer is not repeated."""


@dataclass(frozen=True)
class Row:
    """One side and one context.

    Args:
        side: ``transformers``, or the format of the cache.
        context: tokens of the prompt.
        whole_s: a forward of the whole prompt; None if memory does not suffice.
        chunked_s: forwards of :data:`CHUNK` tokens.
        step_ms: a decode step.
        graph_ms: a decode step in a CUDA graph; None if it was not captured.
        cache_bytes: of a token in all layers.
    """

    side: str
    context: int
    whole_s: float | None
    chunked_s: float
    step_ms: float
    graph_ms: float | None
    cache_bytes: float


class Side:
    """A model with one of the caches, and a prompt ``ids [1, T]``."""

    def __init__(self, model: Any, ids: Tensor, new_cache: Callable[[], Any]) -> None:  # noqa: ANN401
        self.model = model
        self.ids = ids
        self.new_cache = new_cache

    def seconds(self, call: Callable[[], object]) -> float:
        """Wall-clock time of a call."""
        wait = torch.cuda.synchronize if self.ids.is_cuda else lambda: None
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    def prefill(self, chunk: int) -> tuple[Any, Tensor]:
        """The cache of the prompt, and the token that follows."""
        cache = self.new_cache()
        given = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        for piece in self.ids.split(chunk, dim=1):
            logits = self.model(piece, **given).logits
        return cache, logits.argmax(-1)

    def prefill_s(self, chunk: int) -> float:
        """The second of two prefills, or one that takes long."""
        first = self.seconds(lambda: self.prefill(chunk))
        return first if first > ENOUGH_S else self.seconds(lambda: self.prefill(chunk))

    def whole_s(self) -> float | None:
        """A prefill in one forward, if there is memory."""
        try:
            return self.prefill_s(self.ids.shape[1])
        except torch.cuda.OutOfMemoryError:
            return None

    def generate(self, cache: Any, token: Tensor, *, graph: bool) -> tuple[list[int], float]:  # noqa: ANN401
        """The tokens of decode steps, and the median time of one in ms.

        With ``graph`` the first steps run as they are, and the others are replays of a capture.
        """
        token, position = token.clone(), torch.full_like(token, self.ids.shape[1])
        given = {CACHE: cache, "use_cache": True}
        tokens, times = [token.clone()], []

        def step() -> None:
            logits = self.model(token, position_ids=position, **given).logits
            token.copy_(logits.argmax(-1))
            position.add_(1)

        for _ in range(WARM):
            step()
            tokens.append(token.clone())
        run: Callable[[], None] = step
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                step()
            run = captured.replay
        for _ in range(TIMED):
            times.append(self.seconds(run))
            tokens.append(token.clone())
        return torch.cat(tokens).flatten().tolist(), 1e3 * statistics.median(times)


def bytes_of(cache: Any) -> int:  # noqa: ANN401 - a cache of transformers
    """Bytes of its tensors."""
    found = (x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor))
    return sum(x.nbytes for x in found)


def measure(model: Any, ids: Tensor, name: str, *, graphs: bool) -> tuple[Row, list[int]]:  # noqa: ANN401
    """One side: its times, and the tokens that it generates."""
    context = ids.shape[1]
    ours = name != THEIRS
    with contextlib.ExitStack() as stack:
        if ours:
            handle = stack.enter_context(enable(model, cache_format=name))
            length = context + WARM + TIMED
            side = Side(model, ids, lambda: handle.new_cache(1, max_length=length))
        else:
            side = Side(model, ids, lambda: DynamicCache(config=model.config))
        chunked_s = side.prefill_s(CHUNK)
        cache, token = side.prefill(CHUNK)
        size = cache.bytes_per_token if ours else bytes_of(cache) / context
        tokens, step_ms = side.generate(cache, token, graph=False)
        graph_ms = None
        if ours and graphs:
            cache.crop(context - cache.count())
            again, graph_ms = side.generate(cache, token, graph=True)
            if again != tokens:
                raise ValueError(f"{name}: a CUDA graph must give {tokens}, got {again}")
        del cache
        return Row(name, context, side.whole_s(), chunked_s, step_ms, graph_ms, size), tokens


def line(row: Row) -> str:
    """A row of the printed table."""
    whole = "no memory" if row.whole_s is None else f"{row.whole_s:.2f}"
    graph = "-" if row.graph_ms is None else f"{row.graph_ms:.2f}"
    return (
        f"{row.context:>7}  {row.side:<14}{whole:>10}{row.chunked_s:>10.2f}{row.step_ms:>9.2f}"
        f"{graph:>10}{1e3 / (row.graph_ms or row.step_ms):>10.0f}{row.cache_bytes:>9.0f}"
    )


HEADER = (
    f"{'context':>7}  {'side':<14}{'prefill s':>10}{'in 1024s':>10}{'step ms':>9}{'graph ms':>10}"
    f"{'tokens/s':>10}{'B/token':>9}"
)


def run(
    device: str,
    contexts: list[int],
    *,
    layers: int,
    graphs: bool,
    path: Path | None = None,
    **sizes: int,
) -> int:
    """Measure and print; 1 if a side generates other tokens than transformers."""
    with torch.no_grad():
        model = copying_model(
            "deepseek_v32",
            dtype=torch.bfloat16,
            device=device,
            num_hidden_layers=layers,
            attn_implementation="sdpa",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            **(SIZES | sizes),
        )
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        versions = {each.__name__: each.__version__ for each in (torch, transformers)}
        sys.stdout.write(f"{layers} layers, {name}, {versions}\n{HEADER}\n")
        generator = torch.Generator().manual_seed(0)
        rows: list[Row] = []
        wrong = 0
        for context in contexts:
            ids = torch.randint(1, model.config.vocab_size, (1, context), generator=generator)
            ids = ids.to(device)
            expected: list[int] = []
            for side in (THEIRS, *FORMATS):
                row, tokens = measure(model, ids, side, graphs=graphs)
                expected = expected or tokens
                if tokens != expected:
                    wrong = 1
                    sys.stdout.write(f"{context:>7}  {side}: OTHER tokens\n")
                    continue
                rows.append(row)
                sys.stdout.write(line(row) + "\n")
                sys.stdout.flush()
        if path is not None:
            found = {"device": name, "versions": versions, "layers": layers}
            found["rows"] = [asdict(row) for row in rows]
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu to try the script")
    parser.add_argument("--contexts", default="4096,16384,32768", help="tokens of the prompts")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    sys.exit(
        run(
            options.device,
            [int(each) for each in options.contexts.split(",")],
            layers=options.layers,
            graphs=options.device == "cuda" and not options.eager,
            path=options.json,
        )
    )
