"""What runs inside the environments of `whence upgrade`: standard library, numpy, torch, and
what is looked at. It is copied beside its results, so its files import each other relatively.
"""
