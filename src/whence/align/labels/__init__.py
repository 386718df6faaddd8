"""Tensors that face each other without a common call."""
