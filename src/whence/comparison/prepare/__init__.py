"""Brings two runs to a form in which they can be compared: masks, labels, precision."""
