"""Models written anew by somebody else, each beside its reference."""
