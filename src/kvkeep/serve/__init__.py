"""The server: many independent conversations with one model, within one memory budget."""
