"""Files on a disk that others use, too: atomic writes, private files, and a clock that somebody may set."""
