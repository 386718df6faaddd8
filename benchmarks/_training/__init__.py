"""The models, the trainings and the planted faults of `benchmarks/training_faults.py`."""
