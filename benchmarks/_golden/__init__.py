"""The cases of `benchmarks/golden.py`: a file a kind, each with its `CASES`, name -> case."""
