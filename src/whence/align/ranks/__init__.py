"""Joins the ranks of a distributed run into one run."""
