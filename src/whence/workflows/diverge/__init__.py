"""Finds the step at which two trainings diverge."""
