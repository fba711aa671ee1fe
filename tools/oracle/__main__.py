"""Ask llama.cpp what files mean, and write its answers as records that tests read (tests/models/records).

    python tools/oracle ids                       # token ids: the embedded models, tiny vocabularies of every kind
    python tools/oracle models [VARIANT ...]      # tiny models of each architecture, and their log-probabilities
    python tools/oracle likelihood                # log-likelihoods of a text with two embedded models
    python tools/oracle compare FILE.gguf ...     # ids of kvkeep beside those of llama.cpp, on the same texts
    python tools/oracle perplexity MODEL TEXT     # of kvkeep beside that of llama.cpp, on the same file

Needs kvkeep's environment. llama.cpp itself is built from the source distribution of ``llama-cpp-python`` into the
folder ``--work``, which takes minutes, and used from there the next time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import environment
import logprobs
import perplexity
import token_ids
from architectures import ARCHITECTURES

from kvkeep.models.embedded import EMBEDDED, gguf_path

SMALL = ("smollm2", "gemma3-270m")
"""Embedded models that are unpacked to float32."""
RECORDS = token_ids.TESTS / "models" / "records"


def main() -> None:
    """Read the command and run it."""
    options = argparse.ArgumentParser("oracle", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--work", type=Path, default=Path("oracle"), help="folder of llama.cpp and of what is made")
    commands = options.add_subparsers(required=True, metavar="COMMAND")
    for name, run in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        if name == "models":
            command.add_argument("variants", nargs="*", metavar="VARIANT", help="only these")
        if name == "compare":
            command.add_argument("files", nargs="+", type=Path, metavar="FILE")
        if name == "perplexity":
            command.add_argument("model", help="an embedded model's name, or a GGUF file")
            command.add_argument("text", type=Path)
            command.add_argument("--windows", type=int, default=16, help="so many windows of the text")
            command.add_argument("--exact", action="store_true", help="also with weights unpacked to float32")
    given = options.parse_args()
    work = given.work.resolve()
    for folder in (RECORDS, work / "models", work / "vocabularies"):
        folder.mkdir(parents=True, exist_ok=True)
    given.run(environment.found(work), work, given)


def ids(llama_cpp: environment.Environment, work: Path, given: argparse.Namespace) -> None:
    """Record token ids."""
    token_ids.record_texts(RECORDS)
    token_ids.record_tiny(llama_cpp, work / "vocabularies", RECORDS)
    token_ids.record_real(llama_cpp, _embedded(*EMBEDDED), RECORDS)


def models(llama_cpp: environment.Environment, work: Path, given: argparse.Namespace) -> None:
    """Record log-probabilities."""
    said = logprobs.record(llama_cpp, work / "models", RECORDS, given.variants or list(ARCHITECTURES))
    logprobs.write_index(RECORDS / "models.json", said)
    for name, facts in said.items():
        print(f"{name:24}", *(f"{key} {value}" for key, value in facts.items()))


def likelihood(llama_cpp: environment.Environment, work: Path, given: argparse.Namespace) -> None:
    """Record log-likelihoods."""
    perplexity.record(llama_cpp, _embedded(*SMALL), work / "unpacked.gguf", RECORDS / "likelihoods.json")


def compare(llama_cpp: environment.Environment, work: Path, given: argparse.Namespace) -> None:
    """Compare kvkeep's token ids with llama.cpp's."""
    for file in given.files:
        token_ids.compare(llama_cpp, file)


def compare_perplexity(llama_cpp: environment.Environment, work: Path, given: argparse.Namespace) -> None:
    """Compare kvkeep's perplexity with llama.cpp's."""
    known = EMBEDDED.get(given.model)
    exact = work / "unpacked.gguf" if given.exact else None
    perplexity.compare(llama_cpp, gguf_path(known) if known else Path(given.model), given.text, given.windows, exact)


def _embedded(*names: str) -> dict[str, Path]:
    files = {name: gguf_path(EMBEDDED[name]) for name in names}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise SystemExit(f"fetch these models first (kvkeep models --fetch NAME): {', '.join(missing)}")
    return files


COMMANDS = {
    "ids": ids, "models": models, "likelihood": likelihood, "compare": compare, "perplexity": compare_perplexity,
}  # fmt: skip

if __name__ == "__main__":
    main()
