"""Listens to torch: modules, operators, compiled graphs."""
