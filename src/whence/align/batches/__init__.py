"""Brings batches, padding and decode steps to sequences that can be compared."""
