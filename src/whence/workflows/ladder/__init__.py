"""Finds the stage of compilation, or the pass, at which results change."""
