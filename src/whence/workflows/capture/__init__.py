"""Captures a program: in code, around a command, from labels and arrays."""
