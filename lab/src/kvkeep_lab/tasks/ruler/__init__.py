"""RULER's thirteen tasks, made anew from seeds: Hsieh et al., "RULER: What's the Real Context Size of Your
Long-Context Language Models?" (arXiv:2404.06654), in the settings of its published scripts."""

from kvkeep_lab.tasks.ruler.task import Ruler

__all__ = ["Ruler"]
