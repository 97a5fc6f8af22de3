"""What tests and verification share: inputs, comparisons, poison, compilation without a GPU."""
