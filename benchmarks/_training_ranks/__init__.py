"""Trainings of a small decoder on one rank and on several, with faults of ranks to plant."""
