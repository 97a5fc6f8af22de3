"""Which rows the registers of Hopper's CTAs hold, and other limits; without an import of Triton."""

from __future__ import annotations

from typing import NamedTuple

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.integers import next_power_of_2
from sparsemla.kernels.topk.arguments import SelectTopk

COLUMNS_OF_A_CTA = 16384
"""Columns that the registers of one CTA hold."""
MAX_CTAS = 8
"""Most CTAs that share a row."""
MERGE_BLOCK = 16384
"""Most candidates of a row that the registers of one program hold."""


class RegisterSchedule(NamedTuple):
    """Columns of a row, padded, and the number of CTAs that share them."""

    columns: int
    ctas: int


def schedule_registers(call: SelectTopk) -> RegisterSchedule:
    """The schedule for rows of this size, unless :func:`refuse_registers` refuses them.

    Clusters of more than two CTAs do not fill all multiprocessors.
    """
    num_rows, num_cols = call.scores.shape
    columns, ctas = max(2048, next_power_of_2(num_cols)), 1
    if columns > COLUMNS_OF_A_CTA and num_rows:
        processors = num_multiprocessors(call.scores.device)
        most = max(processors // (2 * num_rows), 2 if 2 * num_rows <= processors else 1)
        ctas = min(MAX_CTAS, columns // 8192, 1 << (most.bit_length() - 1))
    return RegisterSchedule(columns, ctas)


def refuse_registers(call: SelectTopk) -> str | None:
    """Why rows do not fit registers, or are selected from faster by lists of candidates."""
    num_rows, num_cols = call.scores.shape
    processors = num_multiprocessors(call.scores.device)
    most = max(4096, 8 * call.topk)
    if num_rows > processors and num_cols > most:
        return f"takes up to {most} columns of more than {processors} rows, got {num_cols}"
    columns, ctas = schedule_registers(call)
    if columns > COLUMNS_OF_A_CTA * ctas:
        return f"holds {COLUMNS_OF_A_CTA * ctas} columns of each of {num_rows} rows, got {num_cols}"
    return None
