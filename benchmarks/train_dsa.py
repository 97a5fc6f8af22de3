"""Train a small model with DeepSeek Sparse Attention, and measure what the sparsity costs.

The model has the attention of DeepSeek-V3.2 and reads bytes: Python sources, and recall, whose
answers are far back in the text (``sparsemla_lab.corpus``). Four stages, each from the weights of
the one before, the last two from the same ones and with the same batches:

    dense      all weights but the indexer's, with dense attention
    warm-up    the indexer alone, on the attention of all rows
    sparse     all weights: the language model over selected rows, the indexer on their attention
    control    as dense

    python benchmarks/train_dsa.py --size toy --out build/toy          # a CPU, some minutes
    python benchmarks/train_dsa.py --size h200 --out build/h200 --export build/h200/model
    torchrun --nproc-per-node 2 benchmarks/train_dsa.py --size h200 --out build/h200

``torchrun`` trains with DistributedDataParallel: the same batches, of which each rank has an equal
number of rows, and one optimizer step on the mean of all gradients. Rank 0 writes, and measures
alone at the end.

Run it again to continue where it stopped. ``log.jsonl`` has a line for every few steps, and
``results.json`` the table of the end. The exit status is 0 if all checks of the table passed; of
the toy, which learns too little to pass the others, those of exact results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dsa_model import (
    Attend,
    Config,
    Model,
    all_rows,
    dense,
    inference,
    last_rows,
    learning,
    measuring,
    over,
    random_rows,
    selection,
    warming_up,
)
from sparsemla import HeadWeight, dequantize_blocks
from sparsemla_lab.corpus import (
    ANSWER,
    TEXT,
    Bytes,
    as_bytes,
    held_out_text,
    needles,
    stream,
    training_text,
    windows,
)
from sparsemla_lab.testing.ranks import gpu_of, shared


class Phase(NamedTuple):
    """A part of the dense stage: short rows and much recall teach to look back soon.

    Args:
        end: share of the stage after which it ends.
        tokens: bytes of a step.
        length: bytes of a row.
        recall: share of rows with recall.
    """

    end: float
    tokens: int
    length: int
    recall: float


@dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Args:
        config: the model.
        dtype: of activations; weights and optimizer are float32.
        phases: of the dense stage; later stages are as the last one.
        letters: of a key, and of a value.
        pairs: items of a row with text.
        steps, rates: of each stage; two rates: the language model's, the indexer's.
        widths: widths of lists in the table.
        torch_too: whether torch's sources are read.
        learns: whether the training is long enough for the checks of what was learnt.
        eval_rows: rows of held-out text, and of recall.
    """

    config: Config
    dtype: torch.dtype
    phases: tuple[Phase, ...]
    letters: int
    pairs: int
    steps: dict[str, int]
    rates: dict[str, tuple[float, float]]
    widths: tuple[int, ...]
    torch_too: bool
    learns: bool
    eval_rows: int


STAGES = {"dense": None, "warm-up": "dense", "sparse": "warm-up", "control": "warm-up"}
"""Stages in their order, and the one whose weights each begins with."""

SIZES = {
    "toy": Size(
        Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            q_lora_rank=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            index_n_heads=4,
            index_topk=16,
            max_position_embeddings=128,
        ),
        dtype=torch.float32,
        phases=(Phase(0.8, 1024, 64, 0.75), Phase(1.0, 1024, 128, 0.5)),
        letters=1,
        pairs=4,
        steps={"dense": 300, "warm-up": 60, "sparse": 40, "control": 40},
        rates={
            "dense": (3e-3, 0),
            "warm-up": (0, 3e-3),
            "sparse": (3e-4, 1e-3),
            "control": (3e-4, 0),
        },
        widths=(8, 16, 32),
        torch_too=False,
        learns=False,
        eval_rows=16,
    ),
    "h200": Size(
        Config(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            q_lora_rank=192,
            qk_nope_head_dim=64,
            v_head_dim=64,
            index_n_heads=8,
            index_topk=256,
            max_position_embeddings=16384,
        ),
        dtype=torch.bfloat16,
        phases=(
            Phase(0.6, 1 << 14, 128, 0.5),
            Phase(0.7, 1 << 15, 512, 0.5),
            Phase(0.8, 1 << 16, 2048, 0.25),
            Phase(1.0, 1 << 16, 4096, 0.25),
        ),
        letters=2,
        pairs=48,
        steps={"dense": 4000, "warm-up": 300, "sparse": 500, "control": 500},
        rates={
            "dense": (1.5e-3, 0),
            "warm-up": (0, 2e-3),
            "sparse": (3e-4, 1e-3),
            "control": (3e-4, 0),
        },
        widths=(128, 256, 512),
        torch_too=True,
        learns=True,
        eval_rows=32,
    ),
}


def losses_of(
    logits: Tensor, batch: Bytes, whole: Bytes | None = None, num_ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """Mean losses, in nats a byte: of text, and of the answers of recall.

    Args:
        logits: float32 ``[B, S, 256]``.
        batch: the rows of this rank.
        whole: the rows of all ranks, over which the mean of the ranks' losses is one.
        num_ranks: how many they are.
    """
    each = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    kinds, all_kinds = batch.kinds.flatten(), (whole or batch).kinds
    text, answers = (
        (each * (kinds == kind)).sum() / ((all_kinds == kind).sum().clamp_min(1) / num_ranks)
        for kind in (TEXT, ANSWER)
    )
    return text, answers


def make_batch(size: Size, text: Tensor, step: int, phase: Phase) -> Bytes:
    """The batch of a step: rows of text, and of recall, one half in text and one half alone."""
    generator = torch.Generator().manual_seed(step)
    count = phase.tokens // phase.length
    recalls = int(count * phase.recall)
    in_text = recalls // 2
    pairs = max(2, size.pairs * phase.length // size.phases[-1].length)
    rows = windows(text, count - recalls + in_text, phase.length + 1, generator)
    plain = rows[: count - recalls]
    parts = (
        Bytes.of(plain, torch.full(plain.shape, TEXT, dtype=torch.uint8)),
        needles(rows[count - recalls :], pairs, size.letters, generator),
        stream(recalls - in_text, phase.length, size.letters, generator),
    )
    columns = zip(*((part.tokens, part.labels, part.kinds) for part in parts), strict=True)
    return Bytes(*map(torch.cat, columns))


def rate(step: int, steps: int, warm_up: int) -> float:
    """The factor of a learning rate: it rises over ``warm_up`` steps, then falls to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class OutOfTime(Exception):
    """The time that the caller gave is over; everything is saved."""


@dataclass
class Run:
    """A run in a folder.

    Args:
        size: the model and its stages.
        steps: of each stage.
        folder: its files.
        device: of the model.
        deadline: when to stop, by ``time.perf_counter``.
        rank: of this process; 0 alone writes.
        num_ranks: processes that train together.
    """

    size: Size
    steps: dict[str, int]
    folder: Path
    device: torch.device
    deadline: float
    rank: int = 0
    num_ranks: int = 1

    def say(self, **line: object) -> None:
        """Add a line to the log."""
        if self.rank:
            return
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def told(self, answer: bool) -> bool:
        """The answer of rank 0, for which the others wait."""
        if self.num_ranks == 1:
            return answer
        said = torch.tensor(int(answer))  # on the CPU, so with gloo: nothing waits for a GPU
        dist.broadcast(said, 0)
        return bool(said)

    def mean(self, value: object) -> object:
        """A number of the log, rounded: the mean of all ranks."""
        if isinstance(value, list):
            return [self.mean(x) for x in value]
        if not isinstance(value, Tensor):
            return value
        if self.num_ranks > 1:
            value = value.clone()
            dist.all_reduce(value)
        return round(value.item() / self.num_ranks, 5)

    def weights(self, stage: str) -> Path:
        """What a stage trained, float32."""
        return self.folder / f"{stage}.safetensors"

    def model(self, stage: str | None) -> Model:
        """The model after a stage; None: at its beginning."""
        torch.manual_seed(0)
        model = Model(self.size.config, self.size.dtype).to(self.device)
        stages = []
        while stage is not None:
            stages.append(stage)
            stage = STAGES[stage]
        for trained in reversed(stages):
            weights = load_file(self.weights(trained), device=str(self.device))
            model.load_state_dict(weights, strict=False)
        return model

    def all_stages(self, text: Tensor) -> bool:
        """Run the stages that are not done; False if the time is over."""
        try:
            for stage in STAGES:
                if not self.weights(stage).exists():
                    self.train(stage, text)
        except OutOfTime:
            return False
        return True

    def train(self, stage: str, text: Tensor) -> None:
        """Run a stage to its end, from its beginning or from where it stopped."""
        model = self.model(STAGES[stage])
        optimizer = self.optimizer(model, stage)
        begin, state = 0, self.folder / "resume.pt"
        if state.exists():
            saved = torch.load(state, map_location=self.device, weights_only=True)
            if saved["stage"] == stage:
                begin = saved["step"]
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
        runs = DistributedDataParallel(model) if self.num_ranks > 1 else model
        before = sum(self.steps[s] for s in ("dense", "warm-up")[: list(STAGES).index(stage)])
        began = saved_at = said_at = time.perf_counter()
        tokens = 0
        for step in range(begin, self.steps[stage]):
            line = self.step(runs, optimizer, stage, step, text, before + step)
            tokens += line.pop("tokens")
            if step % 10 == 9 or step in (0, self.steps[stage] - 1):
                line = {name: self.mean(value) for name, value in line.items()}
                done, now = step + 1 - begin, time.perf_counter()
                seconds = (now - began) / done
                self.say(
                    stage=stage,
                    step=step,
                    seconds=round(seconds, 4),
                    left=round(seconds * (self.steps[stage] - step - 1)),
                    tokens_per_second=round(tokens / (now - said_at)),
                    **line,
                )
                tokens, said_at = 0, now
            now = time.perf_counter()
            if self.rank == 0 and (now > self.deadline or now > saved_at + 60):
                saved_at = now
                torch.save(
                    {
                        "stage": stage,
                        "step": step + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    },
                    state,
                )
            if self.told(now > self.deadline):
                raise OutOfTime
        if self.rank == 0:
            trained = {name: p.data for name, p in model.named_parameters() if p.requires_grad}
            save_file(trained, self.weights(stage))
        self.told(True)

    def optimizer(self, model: Model, stage: str) -> torch.optim.Optimizer:
        """AdamW over what a stage trains; matrices decay."""
        groups = []
        for parameters, lr in zip(model.parts(), self.size.rates[stage], strict=True):
            for parameter in parameters:
                parameter.requires_grad_(lr > 0)
            for decay, some in ((0.1, [2]), (0.0, [1])):
                chosen = [p for p in parameters if p.dim() in some]
                if lr:
                    options = {"lr": lr, "initial_lr": lr, "weight_decay": decay}
                    groups.append({"params": chosen, **options})
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stage: str,
        step: int,
        text: Tensor,
        seed: int,
    ) -> dict[str, Any]:
        """One step; what the log says of it."""
        steps = self.steps[stage]
        done = step / steps if stage == "dense" else 1
        phase = next(phase for phase in self.size.phases if done < phase.end or phase.end == 1)
        whole = make_batch(self.size, text, seed, phase).to(self.device)
        batch = whole.part(self.rank, self.num_ranks)
        index_losses: list[Tensor] = []
        attend = {
            "warm-up": warming_up(index_losses),
            "sparse": learning(index_losses, self.size.config.index_topk),
        }.get(stage, dense)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate(step, steps, min(50, steps // 10 + 1))
        language = losses_of(model(batch.tokens, attend), batch, whole, self.num_ranks)
        total = torch.stack([*index_losses, *(() if stage == "warm-up" else language)]).sum()
        optimizer.zero_grad()
        total.backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return {
            "tokens": phase.tokens,
            "length": phase.length,
            "loss": language[0].detach(),
            "recall_loss": language[1].detach(),
            "kl": [x.detach() for x in index_losses],
            "norm": norm,
        }


def held_out(run: Run) -> tuple[list[Bytes], dict[int, Bytes]]:
    """Batches of held-out text, and for several lengths a batch of recall in it."""
    size, length = run.size, run.size.phases[-1].length
    per_batch = size.phases[-1].tokens // length
    text = as_bytes(held_out_text())
    rows = windows(text, size.eval_rows, length + 1, None)
    kinds = torch.full(rows.shape, TEXT, dtype=torch.uint8)
    batches = [
        Bytes.of(*parts).to(run.device)
        for parts in zip(rows.split(per_batch), kinds.split(per_batch), strict=True)
    ]
    recall = {}
    for context in (length // 4, length // 2, length):
        generator = torch.Generator().manual_seed(context)
        background = windows(text, per_batch, context + 1, generator)
        pairs = max(2, size.pairs * context // length)
        recall[context] = needles(background, pairs, size.letters, generator).to(run.device)
    return batches, recall


@torch.no_grad()
def evaluate(
    model: Model, batches: Sequence[Bytes], recall: dict[int, Bytes], attend: Attend, letters: int
) -> dict[str, object]:
    """The loss of text, also by quarters of its rows, and at each length the recalled values."""
    each = []
    for batch in batches:
        logits = model(batch.tokens, attend).flatten(0, 1)
        losses = functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        each.append(losses.view(batch.labels.shape))
    quarters = torch.cat(each).mean(0).unflatten(0, (4, -1)).mean(1)
    found = {}
    for length, batch in recall.items():
        right = model(batch.tokens, attend).argmax(-1) == batch.labels
        values = right[batch.kinds == ANSWER].view(-1, letters)
        found[str(length)] = values.all(1).float().mean().item()
    return {"loss": quarters.mean().item(), "by_quarter": quarters.tolist(), "recall": found}


def table(run: Run) -> dict[str, dict[str, Any]]:
    """Fill ``results.json``, of which earlier runs may have written a part."""
    topk, path = run.size.config.index_topk, run.folder / "results.json"
    sparse = over(selection, topk)
    rows: dict[str, tuple[str, Attend]] = {
        "dense control": ("control", dense),
        "sparse": ("sparse", sparse),
        "sparse, FP8 cache": ("sparse", over(selection, topk, fp8=True)),
        "exported weights, FP8 cache": ("exported", over(selection, topk, fp8=True)),
        "sparse model, dense attention": ("sparse", dense),
        "random rows": ("sparse", over(random_rows, topk)),
        "last rows": ("sparse", over(last_rows, topk)),
        "warmed-up indexer only": ("warm-up", sparse),
        "untrained indexer": ("dense", sparse),
        **{
            f"sparse, {width} rows": ("sparse", over(selection, width))
            for width in run.size.widths
            if width != topk
        },
    }
    results = json.loads(path.read_text()) if path.exists() else {}
    batches, recall = held_out(run)
    for name, (stage, attend) in rows.items():
        if name not in results:
            model = exported(run) if stage == "exported" else run.model(stage)
            results[name] = evaluate(model, batches, recall, attend, run.size.letters)
            run.say(table=name, **results[name])
            path.write_text(json.dumps(results, indent=1))
            if time.perf_counter() > run.deadline:
                raise OutOfTime
    return results


@torch.no_grad()
def mass(run: Run) -> list[tuple[float, float]]:
    """Of each layer, in a text and in recall: the attention that lists hold, and the best could."""
    batches, recall = held_out(run)
    shares: list[tuple[float, float]] = []
    attend = measuring(dense, run.size.config.index_topk, shares)
    model = run.model("sparse")
    for batch in (batches[0], recall[max(recall)]):
        model(batch.tokens[:1], attend)
    return shares


@torch.no_grad()
def logits_of(run: Run, *attends: Attend) -> list[Tensor]:
    """Logits of two held-out rows of the sparse model, with each attention."""
    tokens = held_out(run)[0][0].tokens[:2]
    model = run.model("sparse")
    return [model(tokens, attend) for attend in attends]


def same_bits(run: Run, text: Tensor) -> bool:
    """Whether two runs of two sparse steps end with the same weights."""
    ends = []
    for _ in range(2):
        model = run.model("warm-up")
        optimizer = run.optimizer(model, "sparse")
        for step in range(2):
            run.step(model, optimizer, "sparse", step, text, step)
        ends.append([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def checks(run: Run, text: Tensor) -> dict[str, tuple[bool, str]]:
    """What the table and the log must show, with the numbers."""
    found, topk = table(run), run.size.config.index_topk
    longest = str(run.size.phases[-1].length)
    control, sparse = found["dense control"], found["sparse"]
    recall = {name: row["recall"][longest] for name, row in found.items()}
    others = max(recall["random rows"], recall["last rows"])
    shares = mass(run)
    log = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    divergences = {
        stage: [sum(line["kl"]) / len(line["kl"]) for line in log if line.get("stage") == stage]
        for stage in ("warm-up", "sparse")
    }
    (first, warm), (begin, end) = ((kl[0], sum(kl[-3:]) / 3) for kl in divergences.values())
    by_sparse, by_inference = logits_of(run, over(selection, topk), inference(topk))
    by_dense, by_all = logits_of(run, dense, over(all_rows, int(longest)))
    agreement = (by_sparse.argmax(-1) == by_inference.argmax(-1)).float().mean().item()
    away = (by_dense.softmax(-1) - by_all.softmax(-1)).abs().mean().item()
    loss = sparse["loss"] - control["loss"]
    last = sparse["by_quarter"][-1] - control["by_quarter"][-1]
    held = min(held / best for held, best in shares)
    return {
        "loss of text within 0.01 of the control's": (loss < 0.01, f"{loss:+.4f}"),
        "and in the last quarter": (last < 0.01, f"{last:+.4f}"),
        "the control recalls": (recall["dense control"] > 0.9, f"{recall['dense control']:.3f}"),
        "recall at least 0.98 of the control's": (
            recall["sparse"] >= 0.98 * recall["dense control"],
            f"{recall['sparse']:.3f}",
        ),
        "random rows and a window fail": (others < 0.3, f"{others:.3f}"),
        "lists hold 0.95 of what the best could": (held >= 0.95, f"{held:.3f}"),
        "warm-up lowers KL below 0.3": (warm < min(0.3, first), f"{first:.3f} to {warm:.3f}"),
        "KL does not rise afterwards": (end <= begin + 0.01, f"{begin:.3f} to {end:.3f}"),
        "lists of all rows equal dense attention": (away < 1e-3, f"{away:.1e} of probability"),
        "inference picks the same bytes": (agreement > 0.999, f"{agreement:.4%}"),
        "two runs have the same bits": (same_bits(run, text), "two steps"),
    }


EXACT = ("lists of all rows equal dense attention", "two runs have the same bits")
"""Checks that do not depend on what was learnt."""

KEPT = ("embed_tokens", "lm_head", "weights_proj")
"""Matrices that stay bfloat16, as norms do."""


def quantized(model: Model) -> dict[str, Tensor]:
    """The weights as in DeepSeek's checkpoints: e4m3 with a scale for each 128 x 128 block."""
    weights = {}
    for name, weight in model.state_dict().items():
        if weight.dim() == 1 or any(part in name for part in KEPT):
            weights[name] = weight.bfloat16()
        else:
            codes = HeadWeight.quantize(weight[None])
            weights[name] = codes.data[0].contiguous()
            weights[f"{name}_scale_inv"] = codes.scale[0].contiguous()
    return weights


def exported(run: Run) -> Model:
    """The model after the sparse stage, with the weights of its checkpoint."""
    model = run.model("sparse")
    weights = quantized(model)
    for name, parameter in model.named_parameters():
        weight, scale = (weights.get(f"{name}{end}") for end in ("", "_scale_inv"))
        value = weight.float() if scale is None else dequantize_blocks(weight, scale)
        parameter.data.copy_(value)
    return model


def export(run: Run, folder: Path) -> None:
    """Write the checkpoint that transformers and ``sparsemla generate`` read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = run.size.config.as_json()
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {name: x.cpu() for name, x in quantized(run.model("sparse")).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and weights")
    parser.add_argument("--export", type=Path, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        metavar=("DENSE", "WARMUP", "SPARSE"),
        help="steps of the stages; the control has as many as the sparse stage",
    )
    return parser.parse_args(arguments)


def as_text(
    results: dict[str, dict[str, Any]],
    found: dict[str, tuple[bool, str]],
    judged: Collection[str],
) -> str:
    """The table and the checks as columns."""
    distances = next(iter(results.values()))["recall"]
    heads = "".join(f"{f'recall at {distance}':>16}" for distance in distances)
    lines = ["", f"{'':<32}{'loss':>8}{heads}"]
    for name, row in results.items():
        recall = "".join(f"{value:>16.3f}" for value in row["recall"].values())
        lines.append(f"{name:<32}{row['loss']:>8.4f}{recall}")
    lines.append("")
    for name, (passed, numbers) in found.items():
        verdict = ("passed" if passed else "failed") if name in judged else "not judged"
        lines.append(f"{name:<44}{verdict:<12}{numbers}")
    return "\n".join([*lines, ""])


def meet(size: Size, device: str) -> tuple[int, int, torch.device]:
    """This process among those that train: its rank, their number, its device."""
    if dist.is_torchelastic_launched():
        # Both are named: with a GPU the default is NCCL alone, and `told` has a tensor of the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if not dist.is_initialized():
        return 0, 1, torch.device(device)
    num_ranks = dist.get_world_size()
    rows = sorted({phase.tokens // phase.length for phase in size.phases})
    if any(count % num_ranks for count in rows):
        raise ValueError(f"ranks must divide the rows of each step, {rows}, got {num_ranks} ranks")
    if device == "cuda":
        place = gpu_of(dist.get_node_local_rank(), num_ranks)
        torch.cuda.set_device(place)
        return dist.get_rank(), num_ranks, place
    return dist.get_rank(), num_ranks, torch.device(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure and export; 0 if all checks pass, 1 if not, 2 if the time is over.

    A rank other than 0 trains only.
    """
    deadline = time.perf_counter()
    given = parse(arguments)
    deadline += 60 * given.minutes
    size = SIZES[given.size]
    steps = size.steps
    if given.steps:
        steps = dict(zip(STAGES, (*given.steps, given.steps[-1]), strict=True))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    given.out.mkdir(parents=True, exist_ok=True)
    rank, num_ranks, device = meet(size, given.device)
    run = Run(size, steps, given.out, device, deadline, rank, num_ranks)
    text = as_bytes(training_text(torch_too=size.torch_too))
    parameters = [sum(p.numel() for p in part) for part in run.model(None).parts()]
    run.say(
        text_bytes=len(text),
        parameters=parameters,
        steps=steps,
        torch=torch.__version__,
        ranks=num_ranks,
        share_a_gpu=device.type == "cuda" and shared(num_ranks),
    )
    in_time = run.all_stages(text)
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()
    if rank:
        return 0
    run = replace(run, num_ranks=1)
    try:
        if not in_time:
            raise OutOfTime
        if given.export:
            export(run, given.export)
        found = checks(run, text)
    except OutOfTime:
        run.say(stopped="the time is over: run again to continue")
        return 2
    judged = found.keys() if size.learns else [name for name in EXACT if name in found]
    for name, (passed, numbers) in found.items():
        run.say(check=name, passed=passed, judged=name in judged, found=numbers)
    sys.stdout.write(as_text(table(run), found, judged))
    return 0 if all(found[name][0] for name in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
