"""`python -m executor`: see `executor.cli`."""

import sys

from executor.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
