"""What `benchmarks/zoo.py` draws from: architectures, other ways to compute the same, faults."""
