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
"""All of them. transformers' GPT-2 looks for padding in every pass, on the host, and layers of Gemma 4 read the entries
of others."""
