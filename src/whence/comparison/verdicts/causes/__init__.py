"""Why something is at fault, where the runs hold more than the verdict needed: words for the
sentence of a verdict, which stays what it is.
"""
