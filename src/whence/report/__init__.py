"""A Comparison -> text, csv, json; computes nothing."""
