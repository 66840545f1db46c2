"""`python -m lightning_dpsparse`."""

from lightning_dpsparse.cli import main

if __name__ == "__main__":
    main()
