"""`python -m sim`: see `sim.cli`."""

import sys

from policies.process.start import start

if __name__ == "__main__":
    sys.exit(start("sim"))
