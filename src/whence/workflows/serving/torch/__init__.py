"""Records forward passes of torch programs sequence by sequence."""
