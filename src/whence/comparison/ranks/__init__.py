"""What the ranks of one run must agree in, told from that run alone."""
