"""Rows and tokens: batches, steps and padding brought to one form."""
