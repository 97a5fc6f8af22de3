"""The assembly that decodes e4m3 where a GPU has no instruction for it, on every code."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sparsemla.kernels.common.fp8 import HALVES_OF_FOUR
from sparsemla_lab.testing.interpreter import ptx


def lop3(a, b, c, table):
    """Bit by bit, the entry of a table of eight."""
    at = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
    return sum((table >> each & 1) << i for i, each in enumerate(at))


def run(text, word):
    """Results ``$0`` and ``$1`` of one word."""
    registers = {"$2": word}
    for instruction in ptx.parse(text).instructions:
        target, *operands = instruction.operands
        values = [registers[x] if isinstance(x, str) else x for x in operands]
        if instruction.name[0] == "lop3":
            registers[target] = lop3(*values)
        else:
            arrays = [np.array([value], np.uint32) for value in values]
            registers[target] = int(ptx.ARITHMETIC[instruction.name[0]](*arrays)[0])
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("first", range(4))
def test_every_code_is_exact_in_every_place(first):
    codes = np.roll(np.arange(256, dtype=np.uint8), first)
    words = np.array([run(HALVES_OF_FOUR.value, int(word)) for word in codes.view(np.uint32)])
    found = torch.from_numpy(words.astype(np.uint32).view(np.float16).reshape(-1))
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float16) / 256
    assert found[~exact.isnan()].view(torch.int16).equal(exact[~exact.isnan()].view(torch.int16))
    assert found.isnan().equal(exact.isnan())
