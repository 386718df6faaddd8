"""Listens to what torch compiles: the graphs, the kernels, and what listening changes."""
