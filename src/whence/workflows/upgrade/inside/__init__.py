"""Code that runs inside the environments of `whence upgrade`.

It needs only the standard library, numpy, torch and the library under test. It is copied next to
its results, so its files import each other relatively.
"""
