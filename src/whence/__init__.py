"""whence: from which operator does the error come?"""

__version__ = "0.1.0"
