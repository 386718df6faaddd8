"""Tests a kernel against its reference on shapes, layouts and values that a test of one shape
lacks.
"""
