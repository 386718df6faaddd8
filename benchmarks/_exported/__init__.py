"""The models, the planted faults and the runs of `benchmarks/exported_models.py`."""
