"""The lab's commands of ``kvkeep``, found by the entry point ``kvkeep.commands``."""

COMMANDS = {
    "verify": ("kvkeep_lab.cli.study:verify", "Check the claims on your model: bits, tokens, KL, bytes."),
    "prove": ("kvkeep_lab.cli.study:prove", "Compare answers with the full cache's, token by token, and time them."),
    "bench": ("kvkeep_lab.cli.study:bench", "Time every cache in one run, and measure its memory."),
    "compare": ("kvkeep_lab.cli.study:compare", "Measure the quality and cost of each method on your own text."),
    "inspect": ("kvkeep_lab.cli.inspect:inspect", "Make a page that shows what a method forgets, step by step."),
    "stream": (
        "kvkeep_lab.cli.study:stream",
        "Read a text of any length within constant memory: perplexity, time, bytes.",
    ),
    "longchat": ("kvkeep_lab.cli.study:longchat", "Measure memory and time of every turn of a long conversation."),
    "recompute": (
        "kvkeep_lab.cli.study:recompute",
        "Compare recomputing evicted entries with reading them, for N = 1 to 4,096.",
    ),
    "analyse": ("kvkeep_lab.cli.study:analyse", "Run any study on one model: data, table and figure."),
    "capacity": (
        "kvkeep_lab.cli.capacity:capacity",
        "Predict how many sessions a machine can serve, by method and length.",
    ),
    "lab": ("kvkeep_lab.cli.lab:app", "Repeat the experiments of papers: list, run and report them."),
}
"""As :data:`kvkeep.cli.COMMANDS`. Commands of ``cli.study`` are made of studies: see there."""
