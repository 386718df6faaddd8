"""Measures how much of the error at the output a call explains, by patching the call."""
