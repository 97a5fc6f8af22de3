"""Reinforcement learning: sample answers over an FP8 cache, and train on what they attended to.

A rollout rounds its cache, so here and there its indexers select another token than those of the
training, and the training's log-probabilities differ from those that the answers were sampled with.
The rollout writes a record of its selections for each answer; the training reads it and attends to
the same tokens.

The model is a small GLM-5 with random weights, in whose layers 1 and 3 the indexer of the layer
before selects. A checkpoint takes its place with ``AutoModelForCausalLM.from_pretrained(...)``. Run
it in some seconds on a CPU:

    python examples/replay_rollout.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM, PreTrainedModel

from sparsemla import FP8_DS_MLA
from sparsemla.backends.records import SelectionRecord
from sparsemla.backends.transformers import enable, pack_selections, split_selections

NAME, PROMPTS, PROMPT_LENGTH, NUM_NEW, TOPK = "small-glm", 4, 40, 24, 16


def make_model() -> PreTrainedModel:
    """Four layers whose attention is far from uniform; rows and index keys as in GLM-5."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "q_lora_rank": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512}
    dims = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    index = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": TOPK}
    config = GlmMoeDsaConfig(
        num_hidden_layers=4,
        mlp_layer_types=["dense"] * 4,
        indexer_types=["full", "shared"] * 2,
        pad_token_id=0,
        eos_token_id=None,
        **sizes,
        **heads,
        **dims,
        **index,
    )
    torch.manual_seed(0)
    model = GlmMoeDsaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4)
    return model


def roll_out(model: PreTrainedModel, prompts: Tensor, folder: Path) -> tuple[Tensor, Tensor]:
    """Sample answers, and write a record for each.

    Returns:
        The tokens of prompts and answers, and the log-probability of each token of the answers.
    """
    with enable(model, cache_format=FP8_DS_MLA, record_selections=True) as rollout:
        sampled = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NUM_NEW,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    for place, selections in enumerate(
        split_selections(rollout.selections, [PROMPT_LENGTH] * len(prompts))
    ):
        record = SelectionRecord(
            model=NAME, topk=TOPK, score_dtype="float8_e4m3fn", selections=selections
        )
        (folder / f"{place}.selections").write_bytes(record.to_bytes())
    return sampled.sequences, chosen(torch.stack(sampled.logits, 1), sampled.sequences)


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token of the answers; ``logits`` are those that predict them."""
    answers = tokens[:, PROMPT_LENGTH:]
    return logits.float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]


def read(folder: Path, num_answers: int) -> dict[int, Tensor]:
    """The selections of all answers, for one forward of the training."""
    records = [
        SelectionRecord.from_bytes((folder / f"{place}.selections").read_bytes())
        for place in range(num_answers)
    ]
    num_tokens = PROMPT_LENGTH + NUM_NEW - 1  # the last token predicts nothing
    return pack_selections(
        [each.checked(model=NAME, topk=TOPK, num_tokens=num_tokens) for each in records]
    )


def main() -> int:
    """Compare log-probabilities; 1 if recorded selections leave the larger difference."""
    model = make_model()
    prompts = torch.randint(1, 64, (PROMPTS, PROMPT_LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        tokens, sampled = roll_out(model, prompts, Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        recorded = read(Path(folder), PROMPTS)
    num_lists = sum(len(lists) for lists in recorded.values())
    sys.stdout.write(f"records: {size / num_lists:.1f} bytes a list of at most {TOPK}\n")
    largest = []
    with enable(model.train(), training=True):
        for name, selections in (("its own", None), ("recorded", recorded)):
            logits = model(tokens[:, :-1], selections=selections).logits
            trained = chosen(logits[:, PROMPT_LENGTH - 1 :], tokens)
            difference = (trained - sampled).abs()
            clipped = ((trained - sampled).exp() - 1).abs() > 0.1
            largest.append(difference.max().item())
            sys.stdout.write(
                f"{name} selections: log-probabilities differ by {difference.mean():.4f} on "
                f"average and {largest[-1]:.3f} at most; {int(clipped.sum())} of {clipped.numel()} "
                "ratios are outside 0.9 to 1.1\n"
            )
    return int(largest[1] >= largest[0])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    sys.exit(main())
