"""The lab's commands of ``kvkeep``, found by the entry point ``kvkeep.commands``."""

COMMANDS = {
    "verify": ("kvkeep_lab.cli.study:verify", "Check on your model what kvkeep promises: bits, tokens, KL, bytes."),
    "prove": ("kvkeep_lab.cli.study:prove", "Check token by token that answers equal the full cache's, and time them."),
    "bench": ("kvkeep_lab.cli.study:bench", "Time every cache in one run, and measure its memory."),
    "compare": ("kvkeep_lab.cli.study:compare", "Measure on your own text how each method changes the answers."),
    "inspect": ("kvkeep_lab.cli.inspect:inspect", "Write a page that shows step by step which tokens a method evicts."),
    "stream": ("kvkeep_lab.cli.study:stream", "Read a text of any length in constant memory: perplexity, time, bytes."),
    "longchat": ("kvkeep_lab.cli.study:longchat", "Measure memory and time of every turn of a long conversation."),
    "recompute": ("kvkeep_lab.cli.study:recompute", "Time whether recomputing or reading evicted entries is faster."),
    "analyse": ("kvkeep_lab.cli.study:analyse", "Run a study of the papers on a model: data, table and figure."),
    "lab": ("kvkeep_lab.cli.lab:app", "List, run and report the experiments of the papers."),
}
"""A table like :data:`kvkeep.cli.COMMANDS`. ``cli.study`` makes commands from studies."""
