"""``python -m sparsemla.verify``."""

import typer

from sparsemla.verify.command import verify

if __name__ == "__main__":
    typer.run(verify)
