"""Where the work of a comparison runs: this process, a pool, a cluster."""
