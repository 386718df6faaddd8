"""Variants of one call of a torch module."""
