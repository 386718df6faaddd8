"""Aligns quantised graphs with the graphs they were made from."""
