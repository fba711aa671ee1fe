"""Generation: prompts, streamed answers, timings and memory."""
