"""Runs a program several times and finds the parts of it that do not repeat."""
