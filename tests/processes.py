"""Python code in new processes that begin with torch and Triton imported, which takes seconds.

Triton compiles there; it may interpret in the process of the tests.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from subprocess import CompletedProcess

import pytest


@contextmanager
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton compiles."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            process.submit(_import).result()  # starts the process
        yield process


def run(process: ProcessPoolExecutor, code: str, *arguments: str) -> CompletedProcess[str]:
    """``python -c code *arguments`` in a copy of that process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return process.submit(_fork, code, arguments, environment).result()


def _import() -> None:
    import sparsemla.testing.compile  # noqa: F401


def _fork(
    code: str, arguments: tuple[str, ...], environment: dict[str, str]
) -> CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            os._exit(_execute(code, arguments))
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        return CompletedProcess(
            arguments, os.waitstatus_to_exitcode(status), out.read(), err.read()
        )


def _execute(code: str, arguments: tuple[str, ...]) -> int:
    sys.argv = ["-c", *arguments]
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
