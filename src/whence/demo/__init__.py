"""The demo: a user of the api that shows a clean pair and a planted fault, on a model of its own or
a real one.
"""

from whence.demo.players import MODELS
from whence.demo.scenes import FAULTS, Scene, play

__all__ = ["FAULTS", "MODELS", "Scene", "play"]
