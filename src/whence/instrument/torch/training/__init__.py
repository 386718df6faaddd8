"""Listens to what makes a run a training run: backward passes and steps of optimisers."""
