"""Puts the answer together from verdicts and findings."""
