"""Runs one model in variants and asks what must not change."""
