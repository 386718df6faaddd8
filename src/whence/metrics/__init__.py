"""Numbers from two aligned arrays. No threshold anywhere."""
