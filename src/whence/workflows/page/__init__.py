"""Measures the contents of a page and writes the page."""
