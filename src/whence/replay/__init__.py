"""Runs a recorded region again: wider dtype, other inputs."""
