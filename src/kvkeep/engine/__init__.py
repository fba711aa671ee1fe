"""One answer as it is written, the pass that reads for one session or many, and the rounds that verify drafts."""
