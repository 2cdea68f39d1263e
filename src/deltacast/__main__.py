"""`python -m deltacast`."""

from deltacast.cli import main

if __name__ == "__main__":
    main()
