"""The keywords of a model's forward that its handle does not name: passed on, or refused."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from sparsemla.backends.transformers.sequences import BOUNDARIES

PASSED_ON = {
    "output_hidden_states": "recorded by hooks on layers",
    "output_router_logits": "recorded by hooks on routers",
    "return_dict": "the kind of the model's output",
    "num_items_in_batch": "read by the loss",
    "ignore_index": "read by the loss",
    "shift_labels": "read by the loss",
    "debug_io": "transformers' own record of inputs and outputs",
    "debug_io_dir": "transformers' own record of inputs and outputs",
    "prune_layers": "transformers' own record of inputs and outputs",
}
"""Keywords that attention does not read, with their reader."""

MODALITIES = ("image_", "video_")
"""Beginnings of the keywords that a model reads for other encoders, and passes to its text, too."""


def split_keywords(
    base: PreTrainedModel, given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of a forward for transformers, and those of :data:`BOUNDARIES`.

    Raises:
        TypeError: a keyword that nothing here reads.
        ValueError: ``output_attentions``, or attention that is not causal.
    """
    config: Any = base.config
    if given.get("output_attentions", config.output_attentions):
        raise ValueError("output_attentions must be False: no attention matrix exists here")
    causal = given.get("is_causal", getattr(config, "is_causal", None))
    if causal is not None and not causal:
        raise ValueError("is_causal must be True: attention here looks back only, got False")
    known = {*PASSED_ON, *BOUNDARIES, "output_attentions", "is_causal"}
    unread = [name for name, value in given.items() if value is not None and name not in known]
    if config.model_type == "glm5_next_text":
        unread = [name for name in unread if not name.startswith(MODALITIES)]
    if unread:
        raise TypeError(
            f"{', '.join(unread)} must be left out: sparsemla's attention does not read "
            f"{'it' if len(unread) == 1 else 'them'}"
        )
    passed = {name: value for name, value in given.items() if name in PASSED_ON}
    boundaries = {name: given[name] for name in BOUNDARIES if given.get(name) is not None}
    return passed, boundaries
