"""BibTeX data of the papers that only the lab cites."""

from __future__ import annotations

from kvkeep.policies.papers import Paper

ASYMKV = Paper(
    "cui2025asymkv",
    "AsymKV",
    "Homogeneous keys, heterogeneous values: exploiting local KV cache asymmetry for long-context LLMs",
    "W. Cui and M. Xu",
    "2025",
    "The Thirty-ninth Annual Conference on Neural Information Processing Systems",
)
CAM = Paper(
    "zhang2024cam",
    "CaM",
    "CaM: cache merging for memory-efficient LLMs inference",
    "Y. Zhang and Y. Du and G. Luo and Y. Zhong and Z. Zhang and S. Liu and R. Ji",
    "2024",
    "Forty-first International Conference on Machine Learning",
)
ATTENTION_MATCHING = Paper(
    "zweiger2026attentionmatching",
    "2602.16284",
    "Fast KV Compaction via Attention Matching",
    "Adam Zweiger and Xinghong Fu and Han Guo and Yoon Kim",
    "2026",
    eprint="2602.16284",
)
EPICACHE = Paper(
    "kim2025epicache",
    "2509.17396",
    "EpiCache: Episodic KV Cache Management for Long Conversational Question Answering",
    "Minsoo Kim and Arnav Kundu and Han-Byul Kim and Richa Dixit and Minsik Cho",
    "2025",
    eprint="2509.17396",
)
D2O = Paper(
    "wan2024d2o",
    "2406.13035",
    "D2O: Dynamic Discriminative Operations for Efficient Generative Inference of Large Language Models",
    eprint="2406.13035",
    year="2024",
)
