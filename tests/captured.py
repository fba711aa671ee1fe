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
CAPTURED_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "phi3", "qwen3_moe", "deepseek_v3"}
"""Those whose layers all have full attention. transformers' GPT-2 looks for padding in every pass, on the host."""
