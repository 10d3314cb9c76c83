"""`loka-sim`, and `python -m loka_sim`: imports next to nothing, so that an interrupt from then on ends quietly."""

import sys


def main() -> int:
    """Run the command line; return its exit code."""
    try:
        from loka_sim.cli import main as run

        return run()
    except KeyboardInterrupt:  # while that was imported: `run` looks after its own
        print("loka-sim: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
