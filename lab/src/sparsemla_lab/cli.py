"""The ``sparsemla`` command. Each subcommand imports its packages when it runs."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import sparsemla
from sparsemla_lab.verify.command import verify

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

MOST_SEED = 2**32 - 1
DEMO_PACKAGES = ("huggingface_hub", "matplotlib", "safetensors", "transformers")


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


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Sparse multi-head latent attention for PyTorch."""


def fail(message: object) -> NoReturn:
    """One line on stderr, exit code 2."""
    typer.echo(f"sparsemla: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(2)


def missing_package(error: ModuleNotFoundError) -> NoReturn:
    """Exit with the command that installs a package of the demo; re-raise any other error."""
    package = (error.name or "").partition(".")[0]
    if package not in DEMO_PACKAGES:
        raise error
    fail(f"{package} is not installed: pip install 'sparsemla[demo]'")


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


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint folder, or v4: a DeepSeek-V4 that is built, not trained; "
            "default: the trained model in the package."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("sparsemla-demo"),
    tokens: Annotated[
        int | None,
        typer.Option(
            min=128,
            help="Bytes of a trained model's texts, 4096 by default; transformers' memory grows "
            "as n^2.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Draws what the model must recall.")
    ] = 0,
    device: Annotated[
        str, typer.Option(help="Of v4: cpu or cuda, for which kernels are compiled first.")
    ] = "cpu",
) -> None:
    """Show what a trained model loses, finds and saves with sparse attention, or what V4 reads."""
    is_v4 = model == "v4"
    if is_v4 and tokens is not None:
        fail("--tokens is for trained models")
    if device not in (("cpu", "cuda") if is_v4 else ("cpu",)):
        fail(f"--device must be cpu{', or cuda' if is_v4 else ' for a trained model'}")
    picture = out / ("contexts.png" if is_v4 else "question.png")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write to {out}: {error.strerror or error}")
    if picture.is_dir():
        fail(f"cannot write {picture}: it is a directory")
    try:
        if is_v4:
            _show_v4(picture, seed, device)
        else:
            _show_trained(model, picture, tokens or 4096, seed)
    except ModuleNotFoundError as error:
        missing_package(error)
    except OSError as error:
        fail(f"cannot write {picture}: {error.strerror or error}")


def _show_trained(model: str | None, picture: Path, tokens: int, seed: int) -> None:
    from rich.progress import Progress

    from sparsemla_lab import demo as work
    from sparsemla_lab.generate import CheckpointError
    from sparsemla_lab.picture import draw_question

    console, errors = Console(highlight=False), Console(stderr=True)
    try:
        with Progress(console=errors, transient=True) as progress:
            report = work.run_demo(
                work.shipped_model() if model is None else Path(model),
                context=tokens,
                seed=seed,
                progress=progress,
            )
    except CheckpointError as error:
        fail(error)
    console.print("The end of a text, and how the model goes on (after |):", style="bold")
    lines = 4 + report.continuation.count("\n")
    text = work.shown(f"{report.prompt}|{report.continuation}", lines=lines)
    console.print(text, markup=False)
    for table in work.report_tables(report):
        console.print(table)
    console.print(work.summary(report))
    draw_question(picture, report.question)
    console.print(f"What each layer selects to answer a question: {picture}")


def _show_v4(picture: Path, seed: int, device: str) -> None:
    import torch
    from rich.progress import Progress

    from sparsemla.validation import missing_gpu
    from sparsemla_lab import demo_v4 as work
    from sparsemla_lab.picture import draw_contexts

    if device == "cuda" and not torch.cuda.is_available():
        fail(f"--device cuda needs a GPU: {missing_gpu()}")
    console, errors = Console(highlight=False), Console(stderr=True)
    with Progress(console=errors, transient=True) as progress:
        report = work.run_demo(device=device, seed=seed, progress=progress)
    console.print("Each part of a token is copied by a path of its own:", style="bold")
    for table in work.report_tables(report):
        console.print(table)
    console.print(work.summary(report))
    draw_contexts(picture, report)
    console.print(f"Rows and time by context: {picture}")


@app.command()
def generate(
    model: Annotated[
        str, typer.Option(help="A checkpoint folder in transformers' format, or a hub id.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    cache_format: Annotated[
        str, typer.Option(help="bf16, fp8_ds_mla, or another format's name.")
    ] = "bf16",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: layers on all GPUs.")
    ] = "cpu",
) -> None:
    """Continue a prompt greedily with a DeepSeek, GLM-5, A.X-K2 or Hunyuan V4 checkpoint.

    The text goes to stdout, speed and cache size to stderr. Without a tokenizer in the checkpoint,
    tokens are bytes if the vocabulary has 256.
    """
    if prompt is not None and prompt_file is not None:
        fail("--prompt and --prompt-file exclude each other, got both")
    if prompt_file is not None:
        text = read_text(prompt_file)
    elif prompt is not None:
        text = os.fsencode(prompt)  # the bytes that were typed, of any encoding
    else:
        fail("--prompt or --prompt-file must be given, got neither")
    try:
        from sparsemla_lab.generate import CheckpointError, generate_text, load_checkpoint
    except ModuleNotFoundError as error:
        missing_package(error)
    errors = Console(stderr=True)
    try:
        with errors.status(f"loading {model}"):
            checkpoint = load_checkpoint(
                model, cache_format=cache_format, dtype=dtype, device=device
            )
        stats = generate_text(checkpoint, text, max_new_tokens, write=_write)
    except CheckpointError as error:
        fail(error)
    typer.echo()
    errors.print(str(stats), highlight=False)


def _write(text: str) -> None:
    typer.echo(text, nl=False)


@app.command()
def doctor() -> None:
    """Versions and devices of this machine, its working tiers, and why the others do not work."""
    from sparsemla_lab.doctor import device_lines, tier_table, version_lines

    console = Console()
    for line in (*version_lines(), *device_lines()):
        console.print(line, highlight=False)
    console.print(tier_table())


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op or branch, such as sparse_decode.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    capability: Annotated[
        str | None, typer.Option(help="9.0, sm_90 or gfx942; default: this machine's GPU.")
    ] = None,
    cache_format: Annotated[str | None, typer.Option(help="Name of the cache's format.")] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query or indexer heads; default: a typical number.")
    ] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Width of the selection.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Query tokens, or requests.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the op's first tensor; default: the usual one.")
    ] = None,
) -> None:
    """Show the kernels of a call, why others do not run it, and how far the GPU is proven."""
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


@app.command()
def bench(
    op: Annotated[str | None, typer.Option(help="Measure this op only.")] = None,
    case: Annotated[
        str | None, typer.Option(help="A regular expression: only workloads that contain it.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file to add the rows to.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for bar and line plots.")] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="A folder of unpacked wheels: vllm/, sgl_flash_mla/, sglang/, ..."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: the GPU, if there is one.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record in the rows; default: the checkout's.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Only print the Markdown tables of this JSON file.")
    ] = None,
    full: Annotated[bool, typer.Option(help="Every size of the step and of top-k.")] = False,
    launches: Annotated[
        Path | None, typer.Option(help="JSON file: only trace when decode steps' kernels run.")
    ] = None,
    host_times: Annotated[
        Path | None, typer.Option(help="JSON file: only time eager calls on the host.")
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
        int | None, typer.Option(min=1, help="Processes that compile all kernels first.")
    ] = None,
) -> None:
    """Time every op beside every peer that is installed, each result checked first.

    Without a GPU: sparse attention beside dense attention under a mask.
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


@app.command()
def warm_up(
    config: Annotated[
        str, typer.Option(help="A model's config.json, the folder that has it, or a hub id.")
    ],
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16 or a format's name; default: bf16, and fp8_ds_mla or (DeepSeek-V4) fp8_584."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="GPUs that share the heads.")
    ] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests of a step.")] = 1024,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step.")
    ] = 16384,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a request; default: the model's.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=0, help="Drafts of a decode.")] = 0,
) -> None:
    """Compile every kernel that an engine with these options reaches, into Triton's cache.

    An engine that starts later finds them there: vLLM with both plugins, or for DeepSeek-V4 an
    engine of one's own.
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


app.command()(verify)
