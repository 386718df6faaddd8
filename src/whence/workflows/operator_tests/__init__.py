"""Writes captured operators as tests, and compares the results of these tests."""
