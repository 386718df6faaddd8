"""Chooses the steps of a long-running program that are recorded, and whether they go to the run or
into a ring in memory.
"""
