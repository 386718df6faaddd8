"""`whence serve-check`: an engine against a reference, from the prompt to the cache, the layer."""
