"""Declared differences: what a policy allows, and quantised weights that nobody declared."""
