"""Finds the modules that may compute in a narrower type, measured one by one and together."""
