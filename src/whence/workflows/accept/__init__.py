"""Decides whether an expectation may be renewed: judges actual against expected values by evidence."""
