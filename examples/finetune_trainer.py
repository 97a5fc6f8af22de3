"""Fine-tune a model on a text of your own with transformers' ``Trainer``: its indexers, then all.

The model is the one of ``sparsemla demo``, which has read Python sources, and the text this
repository's README. A folder with a DeepSeek-V3.2 or GLM-5 checkpoint and its tokenizer takes the
model's place, any file the text's. The last tenth of the text is held out. The ``Trainer`` needs
the package accelerate, which ``-e '.[demo]'`` installs.

    python examples/finetune_trainer.py                    # a CPU, a minute or two
    python examples/finetune_trainer.py --model DIR --text FILE --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from sparsemla.backends.transformers import enable
from sparsemla_lab.demo import shipped_model
from sparsemla_lab.generate import load_checkpoint

README = Path(__file__).resolve().parent.parent / "README.md"


def load(folder: Path | None, text: Path) -> tuple[Any, Tensor]:
    """A model in float32, and the tokens of the text."""
    if folder is None:  # its tokens are bytes
        checkpoint = load_checkpoint(shipped_model(), cache_format="bf16", dtype="float32")
        checkpoint.attention.disable()
        return checkpoint.model, torch.tensor(list(text.read_bytes()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]


def examples_of(tokens: Tensor, length: int) -> list[dict[str, Tensor]]:
    """Sequences of equal length; labels are shifted by the model."""
    whole = len(tokens) // length * length
    return [{"input_ids": row, "labels": row} for row in tokens[:whole].view(-1, length)]


def main(
    folder: Path | None,
    text: Path,
    out: Path,
    *,
    length: int,
    warmup_steps: int,
    steps: int,
    cpu: bool,
) -> int:
    """Train and save the model; 1 unless the loss of the held-out text falls."""
    model, tokens = load(folder, text)
    split = len(tokens) * 9 // 10
    data = {
        "train_dataset": examples_of(tokens[:split], length),
        "eval_dataset": examples_of(tokens[split:], length),
    }
    training = enable(model, training="warmup")

    def trainer(groups: list[dict[str, Any]], max_steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(out),
            max_steps=max_steps,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            use_cpu=cpu,
            dataloader_pin_memory=torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        optimizers = torch.optim.AdamW(groups), None
        made = Trainer(model, arguments, optimizers=optimizers, **data)
        made.remove_callback(PrinterCallback)
        return made

    def show(name: str, loss: float) -> None:
        sys.stdout.write(f"{name:<34}{loss:.3f}\n")
        sys.stdout.flush()

    indexers = {"params": training.indexer_parameters(), "lr": 1e-4}
    main_model = {"params": training.main_parameters(), "lr": 3e-4}

    # The indexers alone, towards dense attention: a new text may need other tokens.
    for parameter in training.main_parameters():
        parameter.requires_grad_(False)
    warm_up = trainer([indexers], warmup_steps)
    show("loss, dense attention", warm_up.evaluate()["eval_loss"])
    warm_up.train()
    show("the indexers' loss, warmed up", training.index_loss.item())

    # All weights. The output's loss has both losses, so the Trainer needs no subclass.
    training.stage = "sparse"
    model.requires_grad_(True)
    sparse = trainer([main_model, indexers], steps)
    before = sparse.evaluate()["eval_loss"]
    show("loss, selected tokens", before)
    sparse.train()
    after = sparse.evaluate()["eval_loss"]
    show(f"loss, {steps} steps later", after)

    training.disable()
    model.save_pretrained(out)
    sys.stdout.write(f"saved to {out}\n")
    return int(after >= before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="folder of a checkpoint; default the demo's model"
    )
    parser.add_argument(
        "--text", type=Path, default=README, help="file to learn; default the README"
    )
    parser.add_argument("--out", type=Path, default=Path("build/finetuned"), help="folder to write")
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence (320)")
    parser.add_argument(
        "--warmup-steps", type=int, default=5, help="steps of the indexers alone (5)"
    )
    parser.add_argument("--steps", type=int, default=15, help="steps of all weights (15)")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    options = vars(parser.parse_args())
    sys.exit(main(options.pop("model"), options.pop("text"), options.pop("out"), **options))
