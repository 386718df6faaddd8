"""Starts a command with capture switched on in every Python that it runs."""
