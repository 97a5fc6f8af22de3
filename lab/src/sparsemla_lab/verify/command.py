"""The command ``verify``; it imports its packages when it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsemla_lab.options import choice, fail

if TYPE_CHECKING:
    from sparsemla_lab.verify.beside import Shared
    from sparsemla_lab.verify.run import OpReport


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="Run a few cases of each op.")] = False,
    op: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Check only this op; may be repeated.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the report to this file; default: none, but "
            "benchmarks/verify-<gpu>.json for a full run in a checkout."
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="Print Markdown for an issue; the rest goes to stderr."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(**choice("--device", "cpu", "cuda"), help="Default: cuda if there is a GPU."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record in the report; default: the checkout's.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Processes that share the cases.")
    ] = 1,
    beside: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Also repeat long calls beside N busy processes."),
    ] = 0,
    acting_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Run the code of an older GPU (sm_80, sm_89) on this one, or on the CPU the Gluon "
            "of Hopper (sm_90) or Ampere (sm_80), interpreted.",
        ),
    ] = None,
) -> None:
    """Check every op against its definition on this machine.

    Errors, reruns, CUDA graphs and batch invariance: each op is compared with its definition on
    many shapes and on poisoned inputs.

    Exit code 1: a case failed, and the report names it.
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from sparsemla_lab.verify import run

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and acting_as:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    try:
        run.check_choice(device, op or (), beside, acting_as)
    except ValueError as error:
        fail(error)
    ops = tuple(op or run.usual_ops(device, acting_as))
    path = json
    if path is None and not quick and _in_checkout():
        name = run.device_name(device, acting_as).lower().replace(" ", "-")
        path = Path("benchmarks") / f"verify-{name}.json"
    if path is not None and (reason := _unwritable(path)):
        fail(f"cannot write {path}: {reason}")

    console = Console(soft_wrap=True, highlight=False, stderr=report)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        cases_of = run.device_of_cases(device, acting_as)
        num_cases = sum(len(run.chosen_cases(one, cases_of, quick)) for one in ops)
        task = progress.add_task("", total=num_cases)

        def on_case(op: str, case: str) -> None:
            progress.update(task, description=f"{op}: {case}", advance=1)

        def on_op(done: OpReport) -> None:
            if jobs > 1:
                progress.update(task, description=done.op, advance=done.cases)
            console.print(op_line(done), markup=False)
            for failure in done.failures:
                console.print(f"  {failure}", markup=False)

        def on_shared(call: Shared) -> None:
            state = "FAILED" if call.failure else "ok"
            line = f"{call.op:<25} {call.case}: {call.runs} runs beside {beside} {state}"
            console.print(line, markup=False)
            if call.failure:
                console.print(f"  {call.failure}", markup=False)

        found = run.verify(
            device,
            quick=quick,
            ops=ops,
            commit=commit,
            jobs=jobs,
            beside=beside,
            acting_as=acting_as,
            on_case=on_case,
            on_op=on_op,
            on_shared=on_shared,
        )
    if path is not None:
        path.write_text(found.to_json(), encoding="utf-8")
    failed = sum(one.failed for one in found.ops)
    verdict = f"{failed} cases failed" if failed else "all passed"
    if beside:
        differing = sum(call.failure is not None for call in found.shared)
        verdict += f"; beside {beside} processes {len(found.shared)} calls, {differing} differed"
    where = "" if path is None else f"; {path}"
    console.print(f"{found.device}: {num_cases} cases, {verdict}{where}", markup=False)
    if report:
        from sparsemla_lab.verify.issue import markdown

        typer.echo(markdown(found, device))
    if not found.passed:
        raise typer.Exit(1)


def _in_checkout() -> bool:
    """Whether the current directory is the checkout of this file."""
    return Path("lab/src/sparsemla_lab/verify/command.py").resolve() == Path(__file__).resolve()


def _unwritable(path: Path) -> str | None:
    """Why the path is not writable, or None; creates the folder of the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "it is a directory" if path.is_dir() else None


def op_line(report: OpReport) -> str:
    """An op's tier and cases, and for each result the worst and the allowed difference."""
    errors = [
        f"{result} {worst:.1e} ({_allowed(report.tolerance[result], report.share[result])})"
        for result, worst in report.worst.items()
    ]
    properties = [
        f"{name.replace('_', ' ')} {found.checked - found.failed}/{found.checked}"
        for name, found in report.properties.items()
    ]
    state = f"{report.failed} FAILED" if report.failed else "ok"
    return (
        f"{report.op:<25} {report.tier:<7} {report.cases:3} cases {state:<9} "
        f"{report.seconds:6.1f} s  {'; '.join(errors + properties)}"
    )


def _allowed(limits: Mapping[str, float] | str, share: float) -> str:
    """A tolerance as text, with the share of it that the worst element reaches."""
    if isinstance(limits, str):
        return limits
    names = [name for name in ("abs", "rel", "size") if name in limits]
    element = " or ".join(f"{name} {limits[name]:.1e}" for name in names) or "equal"
    return f"{share:.0%} of {element}, cos {limits['cos']:.1e}"
