"""Our own run on disk: writer (a Sink), lazy reader (a Run)."""
