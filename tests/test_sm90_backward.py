"""Chunks of Hopper's gradients of attention: each call keeps to its workspace."""

import pytest
import torch

from sparsemla import sparse_attention_backward
from sparsemla.kernels.backward.sm90 import chunks, one_pass, two_tiles
from sparsemla_lab.testing.cases import Draw, sparse_attention_backward_case
from sparsemla_lab.testing.interpreter import acting_as

TERMS = 64 * (2 * 576 + 48)
"""Bytes of the terms of a list of 64 entries, and of their places in the lists."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")
@pytest.mark.parametrize(
    ("kernel", "num_heads", "list_bytes"),
    [(one_pass, 64, TERMS), (two_tiles, 65, TERMS + 4 * 65 * 64)],
    ids=["64 heads", "65 heads"],
)
def test_chunks_keep_to_the_workspace(monkeypatch, kernel, num_heads, list_bytes):
    sizes = []
    monkeypatch.setattr(kernel, "_launch", lambda call, part, *_: sizes.append(part.num_lists))
    monkeypatch.setattr(chunks, "add_terms", lambda *_: None)
    case = sparse_attention_backward_case(
        Draw(0), num_tokens=50, num_rows=70, topk=64, num_heads=num_heads, head_dim=576
    )
    with acting_as("sm_90"):
        for limit in (1, 3 * list_bytes - 1, 3 * list_bytes, 50 * list_bytes):
            sparse_attention_backward(**case | {"max_workspace_bytes": limit})
    assert sizes == [1] * 50 + [2] * 25 + [3] * 16 + [2] + [50]
