"""Writes captured operators as tests, and compares their results."""
