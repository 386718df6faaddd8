"""Measures what each operator of one call loses, and how much of it reaches the outputs."""
