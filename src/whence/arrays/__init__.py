"""A framework's tensor -> host array with its dtype kept, one file a framework; hash, statistics and sketch of a host array."""
