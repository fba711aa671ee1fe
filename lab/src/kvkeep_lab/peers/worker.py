"""Answers questions about a model in an environment of its own: ``python -I worker.py FILE``.

FILE names its class ``ANSWERER``. Each line of input is one JSON object, whose ``do`` names a method of it and whose
other fields are that method's arguments; the answer is a line, too: what the method returns, or ``{"error"}``, a reason
in words. An error of a class that FILE defines is in words already; of others, the class is named, too.

Run by another interpreter, this file and FILE import nothing of kvkeep.
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def main(file: str) -> None:
    """Answer until there are no more questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    answerer = runpy.run_path(file, run_name="peer")["ANSWERER"]()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = getattr(answerer, question.pop("do"))(**question)
        except Exception as error:  # whatever a package raises is its user's to read
            reason = " ".join(str(error).split()) or type(error).__name__
            reported = type(error).__module__ == "peer"
            answer = {"error": reason if reported else f"{type(error).__name__}: {reason}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[-1])
