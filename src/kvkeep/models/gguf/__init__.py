"""GGUF files: what a file states, and the config, the tokenizer and the weights that it becomes."""
