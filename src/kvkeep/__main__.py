"""``python -m kvkeep``."""

from kvkeep.cli import main

main()
