"""Two graphs of one function that name nothing alike: which values of theirs correspond."""
