"""Generate with a model of transformers: its own attention beside sparsemla's, over two caches.

The model is a small DeepSeek-V3.2 whose next token depends on attention by a clear margin: one
head finds the token 37 positions back. So right attention gives the same text in any precision, and
wrong attention another one. A checkpoint takes the model's place with
``AutoModelForCausalLM.from_pretrained(...)``.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsemla import BF16_576, FP8_DS_MLA
from sparsemla.backends.transformers import enable
from sparsemla_lab.testing.models import copying_model

PROMPT_LENGTH, NUM_NEW = 150, 16


def make_model(device: str) -> PreTrainedModel:
    """Two layers with the latent rows and the indexer keys of DeepSeek-V3.2: 512 + 64 and 128."""
    model = copying_model(
        "deepseek_v32",
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
    )
    return model.to(device)


def generate(model: PreTrainedModel, prompt: Tensor) -> list[int]:
    """The new tokens, greedily."""
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )
    return tokens[0, prompt.shape[1] :].tolist()


def main(device: str = "cpu") -> int:
    """Generate three times; 1 if the tokens differ."""
    model = make_model(device)
    prompt = torch.randint(1, 128, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(device)
    expected = generate(model, prompt)
    sys.stdout.write(f"transformers' attention: {expected}\n")
    equal = True
    for cache_format in (BF16_576, FP8_DS_MLA):
        with enable(model, cache_format=cache_format) as attention:
            same = generate(model, prompt) == expected
            size = attention.cache.bytes_per_token
        equal &= same
        sys.stdout.write(
            f"sparsemla, {cache_format.name}: {'the same' if same else 'OTHER'} tokens, "
            f"{size} bytes of cache a token\n"
        )
    return int(not equal)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    sys.exit(main(parser.parse_args().device))
