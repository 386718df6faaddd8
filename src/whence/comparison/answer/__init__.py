"""Puts verdicts and findings together to the answer."""
