"""Writes a script that demonstrates a finding."""
