"""Finds what an upgrade changes: captures the same models under two releases and compares them."""
