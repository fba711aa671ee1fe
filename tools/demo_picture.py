"""Run ``kvkeep demo`` twice and draw what it shows: the picture of the README.

The second run is of a larger model and a longer text, with the exact caches only. It takes about ten minutes.

python tools/demo_picture.py FILE.svg BOOK.txt
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console

from kvkeep.cli import demo

MODEL, TOKENS = "qwen2.5-coder-1.5b", 16_384
CHARACTERS = 5 * TOKENS
"""Characters of the book in which the sentence is planted, a little more than the model reads."""


def main() -> None:
    """Run and write the picture."""
    picture, book = sys.argv[1:]
    demo.out = Console(record=True, width=80, force_terminal=True, highlight=False)
    commands, demo.NEXT = demo.NEXT, ()
    demo.demo()
    demo.NEXT, demo.LOSSY = commands, ()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as planted:
        planted.write(demo.plant(Path(book).read_text("utf-8")[:CHARACTERS]))
        planted.flush()
        demo.demo(doc=planted.name, question=demo.QUESTION, expect=demo.PASSWORD, model=MODEL, tokens=TOKENS)
    demo.out.save_svg(picture, title="kvkeep demo", unique_id="kvkeep-demo")


if __name__ == "__main__":
    main()
