"""What users call, one file or folder a verb."""
