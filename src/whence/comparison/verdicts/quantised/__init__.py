"""Verdicts of layers whose tensors are stored as codes, with scales and zero points of their own."""
