"""The ranks of a run joined to one."""
