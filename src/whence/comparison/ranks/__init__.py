"""Checks, from one run alone, what its ranks must agree in."""
