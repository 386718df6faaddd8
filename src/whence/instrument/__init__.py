"""Listens to a live program and hands calls to a `Sink`."""
