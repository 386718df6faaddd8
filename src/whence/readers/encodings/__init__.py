"""How bytes of foreign files become arrays."""
