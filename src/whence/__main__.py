"""`python -m whence` is the command `whence`."""

from whence.cli import main

if __name__ == "__main__":
    main()
