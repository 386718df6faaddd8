"""Runs a program several times and names what in it does not repeat itself."""
