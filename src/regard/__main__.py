"""`python -m regard` is the same program as `regard`."""

from regard.cli import run

if __name__ == "__main__":
    run()
