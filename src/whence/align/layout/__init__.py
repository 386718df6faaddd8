"""Brings the target's tensors to the reference's layout: splits fused calls, moves axes, reorders
channels.
"""
