"""`whence serve-check`: compares a serving engine with a reference, narrowing from prompt to layer
and cache.
"""
