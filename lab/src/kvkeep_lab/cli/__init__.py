"""The lab's commands of ``kvkeep``, found by the entry point ``kvkeep.commands``."""

COMMANDS = {
    "verify": ("kvkeep_lab.cli.study:verify", "The claims, on your model: bits, tokens, KL, bytes."),
    "prove": ("kvkeep_lab.cli.study:prove", "The same answers as the full cache's, token by token, and their time."),
    "bench": ("kvkeep_lab.cli.study:bench", "Time every cache in one run, and measure its memory."),
    "compare": ("kvkeep_lab.cli.study:compare", "What each method costs, on your own text."),
    "inspect": ("kvkeep_lab.cli.inspect:inspect", "A page that shows what a method forgets, step by step."),
    "stream": ("kvkeep_lab.cli.study:stream", "Read a text of any length in flat memory: perplexity, time, bytes."),
    "longchat": ("kvkeep_lab.cli.study:longchat", "Memory and time of every turn of a long conversation."),
    "recompute": ("kvkeep_lab.cli.study:recompute", "Recompute evicted entries, or read them? N = 1 to 4,096."),
    "analyse": ("kvkeep_lab.cli.study:analyse", "Every study on one model: data, table and figure."),
    "capacity": (
        "kvkeep_lab.cli.capacity:capacity",
        "Predict how many sessions a machine can serve, by method and length.",
    ),
    "lab": ("kvkeep_lab.cli.lab:app", "Experiments beside the papers': list them, run them, report what they found."),
}
"""As :data:`kvkeep.cli.COMMANDS`. Commands of ``cli.study`` are made of studies: see there."""
