"""The laboratory's commands of ``kvkeep``, found by the entry point ``kvkeep.commands``. One file for each."""

COMMANDS = {
    "verify": ("kvkeep_lab.cli.verify:verify", "The claims, on your model: bits, tokens, KL, bytes."),
    "prove": ("kvkeep_lab.cli.prove:prove", "The same answers as the full cache's, token by token, and their time."),
    "bench": ("kvkeep_lab.cli.bench:bench", "Time every cache in one run, and measure its memory."),
    "compare": ("kvkeep_lab.cli.compare:compare", "What each method costs, on your own text."),
    "inspect": ("kvkeep_lab.cli.inspect:inspect", "A page that shows what a method forgets, step by step."),
    "stream": ("kvkeep_lab.cli.stream:stream", "Read a text of any length in flat memory: perplexity, time, bytes."),
    "longchat": ("kvkeep_lab.cli.longchat:longchat", "Memory and time of every turn of a long conversation."),
    "recompute": ("kvkeep_lab.cli.recompute:recompute", "Recompute what left, or read it? N = 1 to 4,096."),
    "analyse": ("kvkeep_lab.cli.analyse:analyse", "Look inside a model as the papers do: data, table and figure."),
    "lab": ("kvkeep_lab.cli.lab:app", "Experiments beside the papers': list them, run them, report what they found."),
}
