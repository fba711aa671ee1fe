"""``python -m kvkeep``: the command line."""

import sys

try:
    from kvkeep.cli import program
except MemoryError:
    sys.exit("kvkeep: There is not enough memory to start.")

program()
