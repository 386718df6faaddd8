"""Shared code of listeners to inference engines, which load a model from a file and run it. Beside
each of the program's models runs a second one that shows the values inside.
"""
