"""Runs a peer in a separate environment: ``python -I worker.py FILE``.

FILE names its class ``ANSWERER``. Each line of input is a JSON object: ``do`` names a method of the class, and the
other fields are the method's arguments. Each answer is a line with the method's result, or ``{"error"}`` with the
reason as text. The reason includes the error's class, except for classes that FILE defines.

Another interpreter runs this file and FILE, so neither imports kvkeep.
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def main(file: str) -> None:
    """Answer each line of input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages may print; only answers go to the original stdout
    answerer = runpy.run_path(file, run_name="peer")["ANSWERER"]()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = getattr(answerer, question.pop("do"))(**question)
        except Exception as error:  # the caller reports any error of a package
            reason = " ".join(str(error).split()) or type(error).__name__
            reported = type(error).__module__ == "peer"
            answer = {"error": reason if reported else f"{type(error).__name__}: {reason}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[-1])
