"""The ``sparsemla`` command. Each subcommand imports its packages when it runs."""

from __future__ import annotations

import difflib
import errno
import io
import json
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

import sparsemla
from sparsemla_lab.options import (
    DEMO_PACKAGES,
    FLOATS,
    INSTALL_DEMO,
    choice,
    examples,
    fail,
)
from sparsemla_lab.screen import Screen
from sparsemla_lab.verify.command import verify

if TYPE_CHECKING:
    from sparsemla_lab.generate import Sampling

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

MOST_SEED = 2**32 - 1


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal's encoding may lack a letter
    try:
        app(prog_name="sparsemla")
    except OSError as error:  # of a write to the terminal, anywhere
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(f"sparsemla: cannot write the output: {error.strerror}")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsemla {sparsemla.__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\nNew here? sparsemla demo, then sparsemla doctor.\n"
    "Examples of a command: sparsemla COMMAND --help"
)
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Sparse multi-head latent attention for PyTorch."""


def share_cores() -> None:
    """Let torch's idle threads sleep, unless the user has chosen; call it before torch is imported.

    They spin otherwise, and beside other work on two cores the demo took up to four times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def missing_package(error: ModuleNotFoundError) -> NoReturn:
    """Exit with the command that installs a package of the demo; re-raise any other error."""
    package = (error.name or "").partition(".")[0]
    if package not in DEMO_PACKAGES:
        raise error
    fail(f"{package} is not installed; in the checkout: {INSTALL_DEMO}")


def read_text(path: Path) -> bytes:
    """A text file's bytes."""
    try:
        text = path.read_bytes()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    if not text:
        fail(f"{path} is empty")
    if b"\0" in text:
        fail(f"{path} is not a text file: it contains NUL bytes")
    return text


@app.command(
    epilog=examples(
        "sparsemla demo",
        "sparsemla demo --topk 4,16,64,256",
        "sparsemla demo --model v4",
    )
)
def demo(
    model: Annotated[
        str,
        typer.Option(
            help="demo: the trained model in the package; v4: a DeepSeek-V4 that is built, not "
            "trained; or a checkpoint folder whose tokens are bytes."
        ),
    ] = "demo",
    topk: Annotated[
        str | None,
        typer.Option(
            metavar="K,K,...",
            help="Compare these numbers of selected rows, for example 16,64,256, and draw a curve, "
            "in place of the demo.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("sparsemla-demo"),
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=128,
            help="Bytes of a trained model's texts, 4096 by default; transformers' memory grows "
            "as n^2.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=MOST_SEED, help="Draw other items to recall, or another text."
        ),
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            **choice("--device", "cpu", "cuda"),
            help="Device for --model v4. With cuda, kernels are compiled first (minutes).",
        ),
    ] = "cpu",
) -> None:
    """Show what a model loses and finds with selected rows.

    The trained model in the package reads texts with all rows and with the rows that its indexer
    selects; --model v4 shows what the layers of a DeepSeek-V4 keep and read. Results come as they
    are ready, the first within seconds. Ctrl-C keeps those that are there.
    """
    is_v4 = model == "v4"
    if is_v4 and tokens is not None:
        fail("--tokens is for trained models")
    if is_v4 and topk is not None:
        fail("--topk is for trained models")
    if device != "cpu" and not is_v4:
        fail(f"--device must be cpu for a trained model, got {device!r}")
    picture = out / ("contexts.png" if is_v4 else "question.png" if topk is None else "topk.png")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write to {out}: {error.strerror or error}")
    if picture.is_dir():
        fail(f"cannot write {picture}: it is a directory")
    share_cores()
    try:
        with Screen() as screen:
            if is_v4:
                _show_v4(picture, seed, device, screen)
            else:
                _show_trained(model, topk, picture, tokens or 4096, seed, screen)
    except ModuleNotFoundError as error:
        missing_package(error)
    except OSError as error:
        fail(f"cannot write {picture}: {error.strerror or error}")
    except KeyboardInterrupt:
        typer.echo(f"sparsemla: interrupted; the lines above and the files in {out} stay", err=True)
        raise typer.Exit(130) from None


def _show_trained(
    model: str, topk: str | None, picture: Path, tokens: int, seed: int, screen: Screen
) -> None:
    from sparsemla_lab import demo as work
    from sparsemla_lab.generate import CheckpointError
    from sparsemla_lab.picture import draw_curve, draw_question

    directory = work.shipped_model() if model == "demo" else Path(model)
    options: Any = {"context": tokens, "seed": seed, "screen": screen, "picture": picture}
    try:
        if topk is None:
            work.run_demo(directory, draw=draw_question, **options)
        else:
            work.run_topk(directory, work.parse_topk(topk), draw=draw_curve, **options)
    except CheckpointError as error:
        fail(f"{error}{_meant(model, 'demo', 'v4')}")
    except ValueError as error:
        fail(error)


def _show_v4(picture: Path, seed: int, device: str, screen: Screen) -> None:
    import torch

    from sparsemla.validation import missing_gpu
    from sparsemla_lab import demo_v4 as work
    from sparsemla_lab.picture import draw_contexts

    if device == "cuda" and not torch.cuda.is_available():
        fail(f"--device cuda needs a GPU: {missing_gpu()}")
    draw_contexts(picture, work.run_demo(device=device, seed=seed, screen=screen))
    screen.line(f"Rows and time by context: {picture}")


@app.command(
    epilog=examples(
        'sparsemla generate --model demo --prompt "def read(" --temperature 0.8',
        "cat start.py | sparsemla generate --model demo --temperature 0.8 --seed 7",
        "sparsemla generate --model ./GLM-5 --device auto --chat",
    )
)
def generate(
    model: Annotated[
        str,
        typer.Option(
            help="A checkpoint folder in transformers' format, a hub id, or demo: the trained "
            "model in the package, which writes Python."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option(help="The prompt; without one, it is read from stdin.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Put the prompt in the checkpoint's chat template; without a prompt, read "
            "messages from the terminal until Ctrl-D.",
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system message of a chat.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens to generate.")
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Draw tokens at this temperature, 1 with --top-p or --top-k alone; default: 0, "
            "the most probable token."
        ),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the fewest tokens with this probability.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Draw from so many most probable tokens.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=MOST_SEED,
            help="Repeat a draw; default: a new seed, which is shown.",
        ),
    ] = None,
    cache_format: Annotated[
        str, typer.Option(help="bf16, fp8_ds_mla, or another format's name.")
    ] = "bf16",
    dtype: Annotated[
        str, typer.Option(**choice("--dtype", *FLOATS), help="Dtype of the weights.")
    ] = "bf16",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: layers on all GPUs.")
    ] = "cpu",
) -> None:
    """Continue a prompt, or chat, with a checkpoint.

    It must be a DeepSeek, GLM-5, A.X-K2 or Hunyuan V4. The text goes to stdout as tokens come;
    tokens a second and the cache's size go to stderr. Without a tokenizer in the checkpoint,
    tokens are bytes if the vocabulary has 256.
    """
    if system is not None and not chat:
        fail("--system needs --chat")
    prompts = _prompts(prompt, prompt_file, chat)
    share_cores()
    try:
        from sparsemla_lab.demo import shipped_model
        from sparsemla_lab.generate import CheckpointError, generate_text, load_checkpoint
    except ModuleNotFoundError as error:
        missing_package(error)
    sampling = _sampling(temperature, top_p, top_k, seed)
    errors = Console(stderr=True)
    messages = [] if system is None else [{"role": "system", "content": system}]
    try:
        with errors.status(f"loading {model}"):
            checkpoint = load_checkpoint(
                shipped_model() if model == "demo" else model,
                cache_format=cache_format,
                dtype=dtype,
                device=device,
                chat=chat,
            )
        for text in prompts:
            pieces: list[str] = []

            def write(piece: str, pieces: list[str] = pieces) -> None:
                pieces.append(piece)
                _write(piece)

            if chat:
                content = text.decode(errors="replace").strip()
                messages.append({"role": "user", "content": content})
            stats = generate_text(
                checkpoint,
                messages if chat else text,
                max_new_tokens,
                sampling=sampling,
                write=write,
            )
            messages.append({"role": "assistant", "content": "".join(pieces)})
            typer.echo()
            typer.echo(str(stats), err=True)
    except CheckpointError as error:
        fail(f"{error}{_meant(model, 'demo')}")
    except KeyboardInterrupt:
        typer.echo()  # the text so far has no newline
        raise typer.Exit(130) from None


def _prompts(prompt: str | None, file: Path | None, chat: bool) -> Iterable[bytes]:
    """The prompt of an option, a file or a pipe, or a terminal's messages of a chat."""
    if prompt is not None and file is not None:
        fail("--prompt and --prompt-file exclude each other, got both")
    if file is not None:
        return [read_text(file)]
    if prompt is not None:
        return [os.fsencode(prompt)]  # the bytes that were typed, of any encoding
    if sys.stdin.isatty() and chat:
        return _typed()
    if not sys.stdin.isatty() and (text := sys.stdin.buffer.read()):
        return [text]
    return fail("--prompt or --prompt-file must be given, or a text on stdin, got neither")


def _typed() -> Iterator[bytes]:
    """Messages of a terminal, a line each, until its end."""
    while True:
        typer.echo("> ", nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        if line.strip():
            yield line


def _sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> Sampling | None:
    """How tokens are drawn, or None for greedy text."""
    from sparsemla_lab.generate import Sampling

    others = {"--top-p": top_p, "--top-k": top_k, "--seed": seed}
    if temperature == 0 or (temperature is None and top_p is None and top_k is None):
        if given := [name for name, value in others.items() if value is not None]:
            fail(f"{' and '.join(given)} must be given with a --temperature above 0")
        return None
    try:
        return Sampling(
            1.0 if temperature is None else temperature,
            1.0 if top_p is None else top_p,
            0 if top_k is None else top_k,
            secrets.randbelow(MOST_SEED + 1) if seed is None else seed,
        )
    except ValueError as error:
        fail(error)


def _meant(model: str, *names: str) -> str:
    """A hint at the name of a model that was perhaps meant."""
    if model in names:
        return ""
    close = difflib.get_close_matches(model.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean --model {close[0]}?" if close else ""


def _write(text: str) -> None:
    typer.echo(text, nl=False)


@app.command(epilog=examples("sparsemla doctor"))
def doctor() -> None:
    """Check what works on this machine, and say why the rest does not.

    Lists versions, devices and their proofs, runs an op in each tier, and names what to do next.
    """
    from sparsemla_lab.doctor import device_lines, next_lines, tier_rows, tier_table, version_lines

    console = Console(highlight=False)
    for line in (*version_lines(), *device_lines()):
        console.print(line, markup=False)
    rows = tier_rows()
    console.print(tier_table(rows))
    for line in next_lines(rows):
        console.print(line, markup=False, soft_wrap=True)


@app.command(
    epilog=examples(
        "sparsemla explain sparse_decode",
        "sparsemla explain indexer_topk --device cuda --capability 9.0 --tokens 4096",
        "sparsemla explain sparse_prefill --device cuda --capability 8.0 --cache-format fp8_ds_mla",
    )
)
def explain(
    op: Annotated[
        str, typer.Argument(metavar="OP", help="An op or branch, such as sparse_decode.")
    ],
    device: Annotated[
        str, typer.Option(**choice("--device", "cpu", "cuda"), help="Kind of device.")
    ] = "cpu",
    capability: Annotated[
        str | None, typer.Option(help="9.0, sm_90 or gfx942; default: this machine's GPU.")
    ] = None,
    cache_format: Annotated[str | None, typer.Option(help="Name of the cache's format.")] = None,
    heads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Query or indexer heads; default: a typical number."),
    ] = None,
    topk: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Width of the selection.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Query tokens, or requests.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            **choice("--dtype", *FLOATS, "fp8", "float8_e4m3fn"),
            help="Dtype of the op's first tensor; default: the usual one.",
        ),
    ] = None,
) -> None:
    """Name the kernels of a call, and why others do not run.

    The last lines say how far the GPU is proven. No GPU is needed.
    """
    from sparsemla_lab.doctor import explain_lines

    try:
        lines = explain_lines(
            op,
            device,
            capability,
            dtype=dtype,
            cache_format=cache_format,
            num_heads=heads,
            topk=topk,
            num_tokens=tokens,
        )
    except (TypeError, ValueError) as error:
        fail(error)
    typer.echo("\n".join(lines))


@app.command(
    epilog=examples(
        "sparsemla bench",
        "sparsemla bench --op sparse_decode --case 'batch 1,'",
        "sparsemla bench --table benchmarks/results-h200.json",
    )
)
def bench(
    op: Annotated[str | None, typer.Option(help="Measure this op only.")] = None,
    case: Annotated[
        str | None,
        typer.Option(help="Measure only workloads that contain this regular expression."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Add the rows to this JSON file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bar and line plots into this folder.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="Measure what this folder of unpacked wheels holds: vllm/, sglang/."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            **choice("--device", "cpu", "cuda"), help="Default: the GPU, if there is one."
        ),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record in the rows; default: the checkout's.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Only print the Markdown tables of this JSON file.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Measure every size of the step and of top-k.")
    ] = False,
    launches: Annotated[
        Path | None,
        typer.Option(help="Only trace when the kernels of decode steps run, into this JSON file."),
    ] = None,
    host_times: Annotated[
        Path | None, typer.Option(help="Only time eager calls on the host, into this JSON file.")
    ] = None,
    acting_as: Annotated[
        str | None,
        typer.Option("--as", help="Run the code of an older GPU (sm_80, sm_89) on this one."),
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option("--set", help="A set of workloads: portable compares portable kernels."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes that compile all kernels first."),
    ] = None,
) -> None:
    """Time every op beside the installed peers.

    Each result is checked before it is timed. Without a GPU: sparse attention beside dense
    attention under a mask.
    """
    from sparsemla_lab.bench import command

    try:
        code = command.bench(
            typer.echo,
            op=op,
            case=case,
            json=json,
            plot=plot,
            peers=peers,
            device=device,
            commit=commit,
            table=table,
            full=full,
            launches=launches,
            host_times=host_times,
            acting_as=acting_as,
            cases=cases,
            jobs=jobs,
        )
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot read or write {error.filename}: {error.strerror or error}")
    raise typer.Exit(code)


@app.command(
    epilog=examples(
        "sparsemla warm-up --config deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8",
        "sparsemla warm-up --config ./GLM-5 --cache fp8_ds_mla --max-num-seqs 256",
    )
)
def warm_up(
    config: Annotated[
        str, typer.Option(help="A model's config.json, the folder that has it, or a hub id.")
    ],
    cache: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT",
            help="bf16 or a format's name; default: bf16, and fp8_ds_mla or (DeepSeek-V4) fp8_584.",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="GPUs that share the heads.")
    ] = 1,
    max_num_seqs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most requests of a step.")
    ] = 1024,
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most tokens of a step.")
    ] = 16384,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most tokens of a request; default: the model's."),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Drafts that a decode verifies.")
    ] = 0,
) -> None:
    """Compile an engine's kernels into Triton's cache.

    These are all that an engine with these options reaches. One that starts later finds them
    there: vLLM with both plugins, or for DeepSeek-V4 an engine of one's own.
    """
    import torch
    from rich.progress import Progress

    from sparsemla.validation import missing_gpu
    from sparsemla.warmup import entry_ratios

    try:
        model = read_config(config)
        is_v4 = bool(entry_ratios(model))
        bf16 = sparsemla.BF16_512 if is_v4 else sparsemla.BF16_576
        servings = [
            sparsemla.Serving.of_model(
                model,
                bf16 if name == "bf16" else sparsemla.get_format(name),
                tensor_parallel_size=tensor_parallel_size,
                max_tokens=max_num_batched_tokens,
                max_requests=max_num_seqs,
                max_query_len=1 + num_speculative_tokens,
                max_seq_len=max_model_len,
            )
            for name in cache or ["fp8_584" if is_v4 else "fp8_ds_mla", "bf16"]
        ]
    except (ValueError, TypeError) as error:
        fail(error)
    if not torch.cuda.is_available():
        fail(
            "warm-up needs a GPU, since kernels are compiled for the one that is present: "
            f"{missing_gpu()}"
        )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("kernels", total=None)
        done = sparsemla.warm_up(
            *servings,
            progress=lambda ready, known: progress.update(task, completed=ready, total=known),
        )
    typer.echo(str(done))


def read_config(model: str) -> dict[str, Any]:
    """The content of a model's ``config.json``: a path, a folder or a hub id."""
    path = Path(model)
    try:
        if path.is_dir():
            path /= "config.json"
        is_there = path.exists()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror or error}")
    if not is_there and model.count("/") == 1 and not model.endswith(".json"):
        try:
            from huggingface_hub import hf_hub_download
        except ModuleNotFoundError as error:
            missing_package(error)
        try:
            path = Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # of the hub's client, and of the network below it
            fail(f"cannot get config.json of {model}: {error}")
    try:
        config = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        fail(f"{path} is not JSON: {error}")
    if not isinstance(config, dict):
        fail(f"{path} must hold an object, got {type(config).__name__}")
    return config


app.command(
    epilog=examples(
        "sparsemla verify --quick",
        "sparsemla verify --op sparse_decode --op indexer_topk",
        "sparsemla verify --quick --device cpu --as sm_90",
    )
)(verify)
