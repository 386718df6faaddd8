"""msquickcmp (`ait debug compare`): labels of two programs in one process."""
