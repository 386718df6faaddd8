"""Graphs that compute with codes of few bits, held against the graph that they were made of."""
