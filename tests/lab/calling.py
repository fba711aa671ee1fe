"""A scripted model that calls where the form of an answer wants a call, and says a few words otherwise."""

from __future__ import annotations

from pathlib import Path

from scripted import END, byte_level, write_gguf


def calling_model(folder: Path) -> str:
    """Write the model into a GGUF file, and return its path."""
    vocabulary = byte_level("So", " it", " is", "<tool_call>", "</tool_call>")
    script = vocabulary.script(["<|start|>", "So", " it", " is", END])
    write_gguf(folder / "calling.gguf", vocabulary, script, positions=16_384)
    return str(folder / "calling.gguf")
