"""The verbs that users call; each has a file or a folder of its own."""
