"""`python -m quire` is `quire`."""

from quire.frontend.cli.main import main

if __name__ == "__main__":
    main()
