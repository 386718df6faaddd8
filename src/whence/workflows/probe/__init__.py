"""Runs one model in variants and checks the properties that its outputs must keep."""
