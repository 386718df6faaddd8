"""Pairs tensors that no call leads to."""
