"""Work of a comparison as tasks for an engine: what is described, and how a worker does it."""
