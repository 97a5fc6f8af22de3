"""The kernels that a call of an op launches, and why the others do not run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparsemla.dispatch import Choice, explaining
from sparsemla.kernels.repeat import unrepeated


@dataclass(frozen=True)
class Explanation:
    """The choice of a kernel for each op that a call launches, in order."""

    choices: tuple[Choice, ...]

    @property
    def kernels(self) -> dict[str, str]:
        """The name of the kernel of each op; of its last call, where an op is called again."""
        return {choice.op: choice.kernel for choice in self.choices}

    def __str__(self) -> str:
        return "\n".join(map(str, self.choices))


def explain(
    op: Callable[..., object],
    *args: object,
    gpu: str | None = None,
    **kwargs: object,
) -> Explanation:
    """The kernels that a call would launch. Nothing is launched, so outputs are not written.

    A backward pass on a GPU runs in threads of autograd, which launch: explain forward passes.

    Args:
        op: a public op, or a function that calls some.
        args, kwargs: its arguments; tensors may lie on torch's ``meta`` device.
        gpu: choose as on this GPU, whatever the tensors' device: ``sm_90``, or ``gfx942``.

    Raises:
        ValueError: an unknown GPU.
        TypeError: op is no function, or gpu no name.
        TypeError, ValueError: an argument that the op refuses.

    >>> import torch
    >>> from sparsemla import merge_states
    >>> outs, lses = torch.empty(2, 5, 64, 512), torch.empty(2, 5, 64)
    >>> print(explain(merge_states, outs, lses))
    merge_states: cpu
      triton: needs CUDA or ROCm tensors, got a CPU
      cpu: chosen
      reference: would do, slower
    >>> explain(merge_states, outs, lses, gpu="sm_89").kernels
    {'merge_states': 'triton'}
    """
    if not callable(op):
        raise TypeError(f"explain: op must be a function, got {type(op).__name__}")
    with unrepeated(), explaining(gpu) as choices:
        op(*args, **kwargs)
    return Explanation(tuple(choices))
