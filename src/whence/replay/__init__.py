"""Runs a recorded region again: in a wider dtype, on other inputs."""
