"""The stages of a comparison, in order."""
