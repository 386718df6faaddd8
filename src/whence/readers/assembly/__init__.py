"""Puts calls and records of a dump together to a run."""
