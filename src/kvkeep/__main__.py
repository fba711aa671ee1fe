"""``python -m kvkeep``: the command line."""

import sys

try:
    from kvkeep.cli import program
except (MemoryError, ImportError) as error:
    if isinstance(error, ImportError) and "failed to map segment" not in str(error):
        raise
    sys.exit("kvkeep: There is not enough memory to start.")

program()
