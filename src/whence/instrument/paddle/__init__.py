"""Listens to Paddle: predictors operator by operator, and layers in dynamic mode."""
