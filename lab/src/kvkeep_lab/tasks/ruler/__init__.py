"""RULER's thirteen tasks, generated from seeds: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?" (arXiv:2404.06654), with the settings of its published scripts.

lm-evaluation-harness (0.4.13) also has these tasks, but they cannot run offline. Its modules download NLTK's sentence
splitter on import, need the package wonderwords, and download the essays, SQuAD and HotpotQA. They generate 500 samples
of each length from a fixed seed, while an experiment chooses seeds, samples and essays.
"""

from kvkeep_lab.tasks.ruler.task import Ruler

__all__ = ["Ruler"]
