"""``python -m sparsemla``, the command line."""

from sparsemla.cli import main

if __name__ == "__main__":
    main()
