"""``python -m kvkeep``: the command line."""

from kvkeep.cli import program

program()
