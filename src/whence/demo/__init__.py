"""The demo: a user of the api that shows a planted fault that is found, in runs that come with
whence, or live beside a clean pair, on a model of its own or a real one.
"""

from whence.demo.players import MODELS
from whence.demo.scenes import FAULTS, Scene, play
from whence.demo.shipped import play as play_shipped

__all__ = ["FAULTS", "MODELS", "Scene", "play", "play_shipped"]
