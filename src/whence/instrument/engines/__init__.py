"""What listeners to engines share: models that a runtime loads from a file and runs, each with a
second one beside it that shows what is computed inside.
"""
