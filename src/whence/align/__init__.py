"""Decides from metadata who faces whom and how both reach the same axes (plan)."""
