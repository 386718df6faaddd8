"""Verdicts of layers whose tensors are stored as codes, with their own scales and zero points."""
