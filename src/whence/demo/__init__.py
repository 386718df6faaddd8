"""The demo: it uses the api to find a planted fault, in runs that come with whence, or in live runs
of a small or a real model, next to a clean pair.
"""

from whence.demo.players import MODELS
from whence.demo.scenes import FAULTS, Scene, play
from whence.demo.shipped import play as play_shipped

__all__ = ["FAULTS", "MODELS", "Scene", "play", "play_shipped"]
