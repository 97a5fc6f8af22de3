"""Outputs may be slices of larger tensors: the op writes the slice and nothing beside it."""

import pytest
import torch

import sparsemla
from sparsemla_lab.testing.compare import assert_equal
from test_errors import CALLS, OUTPUTS

OTHER = 64  # fills the buffer around a slice, in every dtype


def sliced(tensor, dim):
    """A tensor of the same shape, a slice of a larger one along a dim, and the larger one."""
    sizes = list(tensor.shape)
    sizes[dim] = 3 * sizes[dim] + 2
    base = torch.full(sizes, OTHER, dtype=torch.float32).to(tensor.dtype)
    if dim < tensor.dim() - 1:
        return base[(slice(None),) * dim + (slice(1, 2 * tensor.shape[dim], 2),)], base
    return base[..., 1 : 1 + tensor.shape[dim]], base


@pytest.mark.parametrize("rows", ["all", "one"])
@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_outputs_may_be_slices_of_larger_tensors(op, name, rows):
    for dim in range(CALLS[op]()[name].dim()):
        wanted, got = CALLS[op](), CALLS[op]()
        if rows == "one":
            wanted, got = one_request(op, wanted), one_request(op, got)
        got[name], base = sliced(got[name], dim)
        for case in (wanted, got):
            getattr(sparsemla, op)(**case)
        assert_equal(f"{name}, a slice along dim {dim}", got[name].contiguous(), wanted[name])
        got[name].fill_(OTHER)
        assert (base.float() == OTHER).all(), "something beside the slice was written"


ONE = {
    "sparse_decode": ("q", "topk_indices", "topk_lengths", "extra_topk_indices"),
    "dense_decode": ("q", "page_table", "seq_lens"),
    "sparse_prefill": ("q", "topk_indices", "topk_lengths", "extra_topk_indices", "max_logits"),
    "indexer_scores_paged": ("index_q", "weights", "page_table", "seq_lens"),
}


def one_request(op, case):
    """The first request or token alone, for ops that treat rows independently."""
    names = (*ONE.get(op, ()), "extra_topk_lengths", "out", "lse") if op in ONE else ()
    return case | {name: case[name][:1] for name in names if name in case}
