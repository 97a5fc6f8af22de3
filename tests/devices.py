"""Models of transformers with layers on several devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def spread(model: Any, devices: Sequence[torch.device]) -> None:
    """Put the layers on the devices in turn; hooks bring the inputs, as accelerate's do."""
    _place(model, devices[0])
    for module in model.model.children():
        if module is not model.model.layers:
            _bring_inputs(module, devices[0])
    for index, layer in enumerate(model.model.layers):
        device = devices[index % len(devices)]
        _place(layer, device)
        _bring_inputs(layer, device)


def _place(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():  # Module.to refuses fake tensors
        for name, tensor in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(tensor.to(device), False)
        for name, tensor in part.named_buffers(recurse=False):
            part._buffers[name] = tensor.to(device)


def _bring_inputs(module: nn.Module, device: torch.device) -> None:
    module.register_forward_pre_hook(functools.partial(_bring, device), with_kwargs=True)


def _bring(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
