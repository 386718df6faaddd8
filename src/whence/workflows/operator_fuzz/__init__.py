"""A kernel against its reference: shapes, layouts and values that a test of one shape never has."""
