"""Verdicts + data flow -> findings."""
