"""Named tensors that a program hands over, and libraries that save their own."""
