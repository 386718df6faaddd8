"""Compares exported programs, without data."""
