"""Judges declared differences: what a policy allows, and quantised weights that were not
declared.
"""
