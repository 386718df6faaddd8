"""What generated tests import; it travels with them."""
