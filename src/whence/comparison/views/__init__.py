"""The verdicts of other tools, computed from our numbers."""
