"""``python -m sparsemla_lab.verify``."""

import typer

from sparsemla_lab.verify.command import verify

if __name__ == "__main__":
    typer.run(verify)
