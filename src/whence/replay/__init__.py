"""Runs a recorded program again: in a wider dtype, on other inputs, as a script or a test."""
