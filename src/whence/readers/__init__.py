"""Foreign dumps as a Run, one file a format, lazy, never unpickling."""
