"""Run ``kvkeep demo`` and draw what it shows: the picture of the README.

python tools/demo_picture.py FILE.svg
"""

from __future__ import annotations

import sys

from rich.console import Console

from kvkeep.cli import demo


def main() -> None:
    """Run and write the picture."""
    demo.out = Console(record=True, width=80, force_terminal=True, highlight=False)
    demo.demo()
    demo.out.save_svg(sys.argv[1], title="kvkeep demo", unique_id="kvkeep-demo")


if __name__ == "__main__":
    main()
