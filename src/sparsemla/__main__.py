"""``python -m sparsemla``, the command line, which the package ``sparsemla-lab`` brings."""

import importlib
import importlib.util
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("sparsemla_lab") is None:
        sys.exit(
            "sparsemla: the command line is not installed; in a checkout of sparsemla: "
            "python -m pip install -c constraints.txt -e . -e ./lab"
        )
    importlib.import_module("sparsemla_lab.cli").main()
