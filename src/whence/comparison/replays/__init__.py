"""Runs calls of the reference again on the inputs of the target."""
