"""Ask llama.cpp what files mean, and write its answers as records that tests read.

    python tools/oracle models [VARIANT ...]   # tiny models of each architecture, and their log-probabilities

llama.cpp is built from the source distribution of ``llama-cpp-python`` (some 10 minutes) in ``--work``, and used from
there afterwards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import environment
from architectures import ARCHITECTURES
from logprobs import record, write_index

RECORDS = Path(__file__).parents[2] / "tests" / "models" / "records"


def main() -> None:
    """Read the command and run it."""
    options = argparse.ArgumentParser(
        "oracle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("what", choices=["models"])
    options.add_argument("names", nargs="*", help="only these")
    options.add_argument("--work", type=Path, default=Path("oracle"), help="a folder for llama.cpp and what is made")
    given = options.parse_args()
    llama_cpp = environment.found(given.work.resolve())
    (given.work / "models").mkdir(exist_ok=True)
    RECORDS.mkdir(exist_ok=True)
    said = record(llama_cpp, given.work.resolve() / "models", RECORDS, given.names or list(ARCHITECTURES))
    write_index(RECORDS / "models.json", said)
    for name, facts in said.items():
        print(f"{name:24}", *(f"{key} {value}" for key, value in facts.items()))


if __name__ == "__main__":
    main()
