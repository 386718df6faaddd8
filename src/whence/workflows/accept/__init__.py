"""Decides whether an expectation may be renewed, by judging actual against expected values."""
