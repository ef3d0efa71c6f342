"""`python -m hierfl`, the same as `hierfl`."""

from hierfl.cli import main

if __name__ == "__main__":
    main()
