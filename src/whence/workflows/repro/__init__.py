"""Writes a finding as a script that shows it."""
