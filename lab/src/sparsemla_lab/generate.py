"""Text generation from a checkpoint folder or a hub id, with this package's attention."""

from __future__ import annotations

import codecs
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer

from sparsemla.backends.transformers import BatchCache, PagedAttention, enable, refuse
from sparsemla.formats import get_format
from sparsemla.validation import check_integer, check_number, missing_gpu, not_one_of
from sparsemla_lab.checkpoint import (
    CheckpointError,
    match_codes,
    opened_weights,
    read_entries,
    read_object,
    read_quantization,
    unused,
)
from sparsemla_lab.doctor import DTYPES as DTYPE_NAMES
from sparsemla_lab.options import FLOATS

DTYPES = {name: DTYPE_NAMES[name] for name in FLOATS}

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.model", "*.txt", "*.safetensors")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


Messages = list[dict[str, str]]
"""A chat: the ``role`` and ``content`` of each message, the last one a user's."""


class ByteTokenizer:
    """Tokens are bytes; text is UTF-8. There is no chat."""

    has_chat = False

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decoder(self) -> Callable[[int], str]:
        """A function from one token to the text that it completes."""
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        return lambda token: decode(bytes([token]))


class CheckpointTokenizer:
    """The tokenizer in a checkpoint folder."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.has_chat = self._tokenizer.chat_template is not None

    def encode(self, text: bytes) -> list[int]:
        return self._tokenizer(text.decode(errors="replace"))["input_ids"]

    def encode_chat(self, messages: Messages) -> list[int]:
        """A chat in the checkpoint's template, up to where the answer begins."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    def decoder(self) -> Callable[[int], str]:
        """A function from one token to the text that it completes."""
        tokens: list[int] = []
        shown = 0

        def decode(token: int) -> str:
            nonlocal shown
            tokens.append(token)
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                return ""  # the bytes of this character are incomplete
            piece, shown = text[shown:], len(text)
            return piece

        return decode


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with this package's attention, and its tokenizer."""

    model: PreTrainedModel
    attention: PagedAttention
    tokenizer: ByteTokenizer | CheckpointTokenizer


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: logits are divided by it.
        top_p: draw from the fewest tokens whose probabilities have this sum.
        top_k: draw from so many tokens of the highest probabilities; 0 for all.
        seed: of the draw: the same seed and machine give the same text.

    Raises:
        TypeError, ValueError: a number is out of its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0)
        check_number("top_p", self.top_p, above=0)
        if self.top_p > 1:
            raise ValueError(f"top_p must be at most 1, got {self.top_p}")
        check_integer("top_k", self.top_k)
        check_integer("seed", self.seed, 0, 2**32)


@dataclass(frozen=True)
class Stats:
    """Token counts, times and cache size of one generation, and the seed if tokens were drawn."""

    num_prompt: int
    num_new: int
    prefill_seconds: float
    decode_seconds: float
    cache_bytes_per_token: float
    cache_bytes: int
    seed: int | None = None

    def __str__(self) -> str:
        speed = (self.num_new - 1) / self.decode_seconds if self.num_new > 1 else 0.0
        return (
            f"prefill: {self.num_prompt} tokens in {self.prefill_seconds:.2f} s; "
            f"decode: {self.num_new} tokens, {speed:.2f} tokens/s; "
            f"cache: {self.cache_bytes_per_token:.10g} bytes/token, "
            f"{self.cache_bytes} bytes in pages"
            + ("" if self.seed is None else f"; seed {self.seed}")
        )


def load_checkpoint(
    model: str | Path, *, cache_format: str, dtype: str, device: str = "cpu", chat: bool = False
) -> Checkpoint:
    """Load a model, dequantised if its weights are codes, and its tokenizer.

    Every tensor of the folder is a weight of the model, belongs to one, or is refused by name.

    Args:
        model: a folder, or the id ``owner/name`` of a model on huggingface.co, which is downloaded
            into the hub's cache unless it is there.
        cache_format: ``bf16``, or the name of a cache format.
        dtype: a key of :data:`DTYPES`.
        device: ``cpu``, ``cuda`` or ``cuda:1``; or ``auto``, which spreads the layers over all GPUs
            as ``from_pretrained(device_map="auto")`` does, and needs the package accelerate.
        chat: refuse a checkpoint without a chat template.

    Raises:
        CheckpointError: no such model, one of another architecture, incomplete weights, no
            tokenizer, or an unknown format, dtype or device.
    """
    if dtype not in DTYPES:
        raise CheckpointError(str(not_one_of("dtype", DTYPES, dtype)))
    _check_device(device)
    try:
        fmt = None if cache_format == "bf16" else get_format(cache_format)
    except ValueError as error:
        raise CheckpointError(f"cache_format: {error}") from error
    directory = _directory(model)
    raw = _read_config(directory)
    with _quiet(), _blamed_on(directory / "config.json"):
        config = AutoConfig.from_pretrained(directory)
    with _blamed_on(directory):
        tokenizer = _load_tokenizer(directory, raw)
        if chat and not tokenizer.has_chat:
            raise CheckpointError(f"{directory} has no chat template: leave out --chat")
        loaded = _load_model(directory, config, raw, DTYPES[dtype], device)
    with _blamed_on(directory):
        return Checkpoint(loaded, enable(loaded, cache_format=fmt), tokenizer)


def _check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    if device == "auto":
        return
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise CheckpointError(f"device must be auto, cpu, cuda or cuda:<index>, got {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise CheckpointError(f"device must be on this machine, got {device!r}: {missing_gpu()}")


def _directory(model: str | Path) -> Path:
    """The folder of a checkpoint; files of a hub id are downloaded."""
    directory = Path(model)
    with _blamed_on("model"):  # a name that no file can have
        is_there = directory.exists()
    if is_there or not HUB_ID.fullmatch(str(model)):
        return directory
    with _blamed_on(f"{model} is neither a folder nor a readable model on huggingface.co"):
        # The configuration first: a model of another architecture costs no further download.
        _read_config(Path(snapshot_download(str(model), allow_patterns="*.json")))
        return Path(snapshot_download(str(model), allow_patterns=list(HUB_FILES)))


@contextlib.contextmanager
def _blamed_on(source: object) -> Iterator[None]:
    """Turn any error into a CheckpointError: transformers raises many kinds for bad files."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        raise CheckpointError(f"{source}: {kind}{error}") from error


def _read_config(directory: Path) -> dict[str, Any]:
    config = read_object(directory / "config.json")
    if reason := refuse(config.get("model_type")):
        raise CheckpointError(f"{directory / 'config.json'}: {reason}")
    read_quantization(directory / "config.json", config)
    if (directory / "generation_config.json").exists():
        _check_generation(directory / "generation_config.json")
    return config


def _check_generation(path: Path) -> None:
    """Refuse options that transformers does not take, and several texts for a prompt."""
    generation = read_object(path)
    for name in ("num_beams", "num_return_sequences"):
        if (value := generation.get(name)) not in (None, 1):
            raise CheckpointError(f"{path}: {name} must be 1 for a single text, got {value!r}")
    with _quiet(), _blamed_on(path):
        GenerationConfig.from_pretrained(path.parent)


def _load_tokenizer(directory: Path, config: dict[str, Any]) -> ByteTokenizer | CheckpointTokenizer:
    for name in TOKENIZER_FILES:
        if (directory / name).exists():
            with _blamed_on(directory / name):
                return CheckpointTokenizer(directory)
    if config.get("vocab_size") != 256:
        raise CheckpointError(
            f"{directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}), and its tokens are "
            f"not bytes: vocab_size must be 256, got {config.get('vocab_size')}"
        )
    return ByteTokenizer()


def _load_model(
    directory: Path,
    config: Any,  # noqa: ANN401 - each model has its own
    raw: dict[str, Any],
    dtype: torch.dtype,
    device: str,
) -> PreTrainedModel:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    layouts = read_quantization(directory / "config.json", raw)
    entries = read_entries(directory)
    with _quiet(), _blamed_on(directory / "config.json"), torch.device("meta"):
        state = model_class(config).state_dict()
        is_unused = unused(config, state, model_class._keys_to_ignore_on_load_unexpected or ())
        needed = {name: entry for name, entry in entries.items() if not is_unused(name)}
    integers = {name for name, each in state.items() if not each.is_floating_point()}
    codes = match_codes(needed, layouts, {name.rpartition(".")[2] for name in integers})
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, by name
    }
    if device == "auto":
        options["device_map"] = "auto"
    if layouts:
        del config.quantization_config
    with _quiet(), opened_weights(needed, codes, dtype) as weights:
        model, loading = model_class.from_pretrained(None, state_dict=weights, **options)
    if (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(
            f"{directory} lacks {len(missing)} weights, the first of them {missing[0]}"
        )
    for name, got, expected in sorted(loading["mismatched_keys"]):
        raise CheckpointError(
            f"{directory / 'config.json'} does not fit the weights: {name} must have shape "
            f"{list(expected)}, got {list(got)}"
        )
    if unknown := sorted(loading["unexpected_keys"]):
        path = entries[unknown[0]].path if unknown[0] in entries else directory
        raise CheckpointError(
            f"{path}: {unknown[0]} must be a weight of the model that config.json describes; "
            f"{len(unknown)} tensors are not"
        )
    return model if device == "auto" else model.to(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars; errors still arrive as exceptions."""
    logging = transformers.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


@contextlib.contextmanager
def _drawing(sampling: Sampling | None) -> Iterator[dict[str, Any]]:
    """Options of ``generate``, with torch's generators at the seed meanwhile."""
    if sampling is None:
        yield {"do_sample": False}
        return
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        yield {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }


class _Streamer(BaseStreamer):
    """Writes text as tokens arrive and records their times."""

    def __init__(self, decode: Callable[[int], str], write: Callable[[str], None]) -> None:
        self.times = [time.perf_counter()]
        self.error: BaseException | None = None  # of the caller's write
        self._decode = decode
        self._write = write
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:  # generate() sends the prompt first
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        for token in value.flatten().tolist():
            text = self._decode(token)
            try:
                self._write(text)
            except BaseException as error:
                self.error = error
                raise

    def end(self) -> None:
        return


def generate_text(
    checkpoint: Checkpoint,
    prompt: bytes | Messages,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    write: Callable[[str], None],
) -> Stats:
    """Continue a text, or answer the last message of a chat.

    Args:
        checkpoint: the model; for a chat, one with a chat template.
        prompt: the text, or the chat.
        max_new_tokens: most tokens to generate.
        sampling: how to draw tokens; None for the most probable token at each step.
        write: gets the new text piece by piece.

    Raises:
        CheckpointError: the prompt has no tokens, or a token beyond the model's vocabulary; or
            the generation fails, for example by an option of generation_config.json.
        ValueError: max_new_tokens is below 1. Errors of ``write`` are passed on.
    """
    check_integer("max_new_tokens", max_new_tokens, 1)
    with _blamed_on("the tokenizer cannot encode the prompt"):
        if isinstance(prompt, bytes):
            tokens = checkpoint.tokenizer.encode(prompt)
        else:
            tokens = cast(CheckpointTokenizer, checkpoint.tokenizer).encode_chat(prompt)
    ids = torch.tensor([tokens], device=checkpoint.model.device)
    if ids.numel() == 0:
        raise CheckpointError("the prompt has no tokens")
    vocab_size = cast(Any, checkpoint.model).config.vocab_size
    if ids.max() >= vocab_size:
        raise CheckpointError(
            f"the tokenizer does not fit config.json: vocab_size must be above {int(ids.max())}, "
            f"a token of the prompt, got {vocab_size}"
        )
    streamer = _Streamer(checkpoint.tokenizer.decoder(), write)
    try:
        with _quiet(), _drawing(sampling) as options:
            cast(Any, checkpoint.model).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                use_cache=True,  # which training scripts turn off in config.json
                streamer=streamer,
                **options,
            )
    except Exception as error:  # transformers checks few of its options
        if error is streamer.error:
            raise
        kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
        place = "by an option of generation_config.json or config.json"
        if count := len(streamer.times) - 1:
            place = f"after {count} tokens"
        raise CheckpointError(f"the generation failed {place}: {kind}{error}") from error
    cache = cast(BatchCache, checkpoint.attention.cache)
    times = streamer.times
    return Stats(
        num_prompt=ids.shape[1],
        num_new=len(times) - 1,
        prefill_seconds=times[1] - times[0],
        decode_seconds=times[-1] - times[1],
        cache_bytes_per_token=cache.bytes_per_token,
        cache_bytes=cache.nbytes,
        seed=None if sampling is None else sampling.seed,
    )
