"""``python -m sparsemla_lab.bench``: the benchmark without the command's packages."""

import argparse
import sys
from pathlib import Path

from sparsemla_lab.bench.command import bench


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsemla_lab.bench", description=bench.__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in ("op", "case", "device", "commit"):
        parser.add_argument(f"--{name}")
    for name in ("json", "plot", "peers", "table", "launches", "host-times"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--as", dest="acting_as")
    parser.add_argument("--set", dest="cases")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--full", action="store_true")
    try:
        return bench(_write, **vars(parser.parse_args()))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"sparsemla: {error}\n")
        return 2


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
