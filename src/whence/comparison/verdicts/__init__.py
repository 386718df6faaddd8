"""Turns evidence into verdicts and findings, one kind of evidence a file."""
