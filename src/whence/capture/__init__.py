"""Listens to a live program and hands calls to a Sink; session says what and when, each other file is one way to listen."""
