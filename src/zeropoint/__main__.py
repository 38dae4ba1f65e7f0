"""``python -m zeropoint``."""

from zeropoint.cli import main

if __name__ == "__main__":
    main()
