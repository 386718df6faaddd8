"""Writes a recorded program as a script or a test."""
