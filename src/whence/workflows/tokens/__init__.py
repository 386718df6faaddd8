"""Compares generated tokens, prompt by prompt and commit by commit."""
