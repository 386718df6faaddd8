"""What torch, Paddle and numpy tensors are, and how they become host arrays. One file a framework
and subject.
"""
