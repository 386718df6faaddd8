"""Writes results as text, CSV, JSON and HTML; computes nothing."""
