"""Measures what a page shows, and writes it."""
