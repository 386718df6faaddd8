"""What the two runs were given: inputs of the roots, positions and masks."""
