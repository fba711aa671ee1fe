"""RULER's thirteen tasks, made from seeds: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context
Language Models?" (arXiv:2404.06654), in the settings of its published scripts.

lm-evaluation-harness (0.4.13) has them too, but they cannot run offline: its modules fetch NLTK's sentence splitter as
they are imported, need the package wonderwords, and fetch the essays, SQuAD and HotpotQA. They also make 500 samples of
each length from one fixed seed, where an experiment has seeds, samples and essays of its own.
"""

from kvkeep_lab.tasks.ruler.task import Ruler

__all__ = ["Ruler"]
