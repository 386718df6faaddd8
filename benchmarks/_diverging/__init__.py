"""The models, the harmless changes and the faults of `benchmarks/diverging.py`."""
