"""Which steps of a program that runs for long are recorded, and where to: the run, or a ring."""
