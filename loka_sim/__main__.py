"""`python -m loka_sim`."""

import sys

from loka_sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
