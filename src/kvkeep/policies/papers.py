"""The papers that methods are from, as BibTeX. Which ones those are, the ``source`` of their parts says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.policies.methods import Method

_ARXIV = re.compile(r"\d{4}\.\d{5}")


@dataclass(frozen=True)
class Paper:
    """One paper. key: of its entry. named: how a source names it: an arXiv id, or a word. author: as BibTeX has it.
    where: what it was published in; eprint: its arXiv id. A field that is empty
    is not known here, and left out."""

    key: str
    named: str
    title: str = ""
    author: str = ""
    year: str = ""
    where: str = ""
    eprint: str = ""

    def bibtex(self) -> str:
        """Return the entry: an article in proceedings where those are known, else a preprint."""
        fields = {"title": f"{{{self.title}}}" if self.title else "", "author": self.author, "year": self.year}
        fields |= {"booktitle": self.where}
        if self.eprint:
            fields |= {"eprint": self.eprint, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.eprint}"}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        bare = [] if self.title else [f"% arXiv:{self.eprint}: its title and authors are not known here"]
        return "\n".join([*bare, f"@{'inproceedings' if self.where else 'misc'}{{{self.key},", *lines, "}"])


PAPERS = (
    Paper(
        "qasim2026residual",
        "2603.19664",
        "The Residual Stream Is All You Need: On the Redundancy of the KV Cache in Transformer Inference",
        "Kaleem Ullah Qasim and Jiashu Zhang and Muhammad Kafeel Shaheen and Razan Alharith and Heying Zhang",
        "2026",
        eprint="2603.19664",
    ),
    Paper(
        "yuan-kvreviver",
        "KVReviver",
        "KVReviver: Reversible KV Cache Compression with Sketch-Based Token Reconstruction",
        "Aomufei Yuan and Zhiming Wang and Ruijie Miao and Dayu Wang and Yuxuan Tian and Zihan Wang and Yebo Peng and "
        "Yuhan Wu and Bairen Yi and Xin Liu and Tong Yang",
    ),
    Paper(
        "liu2026kvslimmer",
        "2603.00907",
        "KVSlimmer: Theoretical Insights and Practical Optimizations for Asymmetric KV Merging",
        "Lianjun Liu and Hongli An and Weiqi Yan and Xin Du and Shengchuan Zhang and Huazhong Liu and Yunshan Zhong",
        "2026",
        eprint="2603.00907",
    ),
    Paper(
        "zhang2023h2o",
        "2306.14048",
        "H2O: Heavy-hitter oracle for efficient generative inference of large language models",
        "Z. Zhang and Y. Sheng and T. Zhou and T. Chen and L. Zheng and R. Cai and Z. Song and Y. Tian and C. R{\\'e} "
        "and C. Barrett and Z. Wang and B. Chen",
        "2023",
        "Advances in Neural Information Processing Systems 36",
        "2306.14048",
    ),
    Paper(
        "li2024snapkv",
        "2404.14469",
        "SnapKV: LLM knows what you are looking for before generation",
        "Y. Li and Y. Huang and B. Yang and B. Venkitesh and A. Locatelli and H. Ye and T. Cai and P. Lewis and "
        "D. Chen",
        "2024",
        "Advances in Neural Information Processing Systems 37",
        "2404.14469",
    ),
    Paper(
        "xiao2024streaming",
        "2309.17453",
        "Efficient streaming language models with attention sinks",
        "G. Xiao and Y. Tian and B. Chen and S. Han and M. Lewis",
        "2024",
        "The Twelfth International Conference on Learning Representations",
        "2309.17453",
    ),
    Paper(
        "oren2024tova",
        "2401.06104",
        "Transformers are multi-state RNNs",
        "M. Oren and M. Hassid and Y. Adi and R. Schwartz",
        "2024",
        "Proceedings of the 2024 Conference on Empirical Methods in Natural Language Processing",
        "2401.06104",
    ),
    Paper(
        "cai2025pyramidkv",
        "2406.02069",
        "PyramidKV: Dynamic KV cache compression based on pyramidal information funneling",
        "Z. Cai and Y. Zhang and B. Gao and Y. Liu and Y. Li and T. Liu and K. Lu and W. Xiong and Y. Dong and J. Hu "
        "and W. Xiao",
        "2025",
        "Second Conference on Language Modeling",
        "2406.02069",
    ),
    Paper(
        "devoto2024l2norm",
        "2406.11430",
        "A simple and effective L2 norm-based strategy for KV cache compression",
        "A. Devoto and Y. Zhao and S. Scardapane and P. Minervini",
        "2024",
        eprint="2406.11430",
    ),
    Paper(
        "tang2024quest",
        "2406.10774",
        "Quest: Query-aware sparsity for efficient long-context LLM inference",
        "J. Tang and Y. Zhao and K. Zhu and G. Xiao and B. Kasikci and S. Han",
        "2024",
        eprint="2406.10774",
    ),
    Paper(
        "liu2024kivi",
        "2402.02750",
        "KIVI: A tuning-free asymmetric 2bit quantization for KV cache",
        "Z. Liu and J. Yuan and H. Jin and S. Zhong and Z. Xu and V. Braverman and B. Chen and X. Hu",
        "2024",
        "International Conference on Machine Learning",
        "2402.02750",
    ),
    Paper(
        "kwon2023paged",
        "2309.06180",
        "Efficient memory management for large language model serving with PagedAttention",
        "W. Kwon and Z. Li and S. Zhuang and Y. Sheng and L. Zheng and C. H. Yu and J. Gonzalez and H. Zhang and "
        "I. Stoica",
        "2023",
        "Proceedings of the 29th Symposium on Operating Systems Principles",
        "2309.06180",
    ),
)
"""What is known of papers beside their arXiv ids, from their own title pages and each other's references."""


def papers_of(methods: Iterable[Method]) -> list[Paper]:
    """Return the papers that the sources of methods, and of their parts, name, each once: of those known here, and of
    the ``papers`` of a package's parts. An arXiv id of which nothing more is known is an entry with that id."""
    found: dict[str, Paper] = {}
    for method in methods:
        parts = (method, method.selector, method.fate, method.recall)
        listed = [*PAPERS, *(paper for part in parts for paper in getattr(part, "papers", ()))]
        for source in (str(getattr(part, "source", "")) for part in parts):
            known = [paper for paper in listed if re.search(rf"\b{re.escape(paper.named)}\b", source)]
            bare = [number for number in _ARXIV.findall(source) if all(paper.named != number for paper in known)]
            known += [Paper(f"arxiv{number}", number, year=f"20{number[:2]}", eprint=number) for number in bare]
            found |= {paper.key: paper for paper in known}
    return list(found.values())
