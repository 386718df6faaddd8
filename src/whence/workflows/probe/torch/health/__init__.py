"""What each operator of one call loses, and what the outputs see of it."""
