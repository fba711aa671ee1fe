"""Tests of the library run with the one that KVKEEP_TEST_LIBRARY names, which sanitizers watch (``make sanitize``)."""

from __future__ import annotations

import os
from pathlib import Path

from kvkeep.native import library

if "KVKEEP_TEST_LIBRARY" in os.environ:
    library.FILE = Path(os.environ["KVKEEP_TEST_LIBRARY"])
