"""Methods and families whose steps are captured in graphs of CUDA."""

CAPTURED = {
    name: 16
    for name in (
        *("window", "h2o", "h2o:halflife=8", "snapkv", "tova", "knorm", "random", "lru", "keydiff", "adakv", "kvzip"),
        *("expected-attention", "streaming-llm", "streaming-llm:positions=absolute"),
    )
} | {"pyramidkv": 48, "duo-attention": 48}
"""Methods whose steps are captured, and budgets that are full after a prompt, in every head."""
LENGTH = 97
MOVING_FAMILIES = {"gemma2", "gemma3", "gpt_oss", "qwen3_next", "lfm2", "bamba", "falcon_h1"}
"""Those with sliding windows or recurrent states whose steps are captured."""
CAPTURED_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "phi3", "qwen3_moe", "deepseek_v3"} | MOVING_FAMILIES
"""All families whose steps are captured. The others are GPT-2, in which transformers looks for padding on the host in
every pass, and Gemma 3n and Gemma 4, whose layers read the entries of others."""
