"""Finds corresponding values of two graphs of one function that share no names."""
