"""Chat templates that write calls as families of models do, for tests: short ones, with the same marks."""

from __future__ import annotations

from typing import Any

MARKS = ("<|start|>", "<|turn|>")


def template(calls: str, answer: str = "{{ m.content or '' }}", begin: str = "") -> str:
    """A template that describes tools, and writes ``calls`` of answers after their text. begin: what the prompt gives
    an answer to begin with."""
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
        "{{ '<|start|>' + m.role + '\n' }}"
        f"{{% if m.role == 'assistant' %}}{answer}{{% if m.tool_calls %}}{calls}{{% endif %}}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|turn|>' }}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '<|start|>assistant\n' }}}}{begin}{{% endif %}}"
    )


def each(call: str, between: str = "") -> str:
    """The part of a template that writes every call. c: the call's function."""
    joint = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for t in m.tool_calls %}}{{% set c = t.function %}}{call}{joint}{{% endfor %}}"


_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_THOUGHT = (
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
)
_PARAMETER = (
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
    "{% endfor %}"
)
_VALUE = (
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
)
_DSML = (
    "{% for k, v in c.arguments.items() %}"
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}"
)
TEMPLATES: dict[str, str] = {
    "hermes": template(each(f"\n<tool_call>\n{_JSON}\n</tool_call>")),
    "qwen3": template(each(f"<tool_call>\n{_JSON}\n</tool_call>", "\n"), _THOUGHT),
    "qwen3 coder": template(
        each("<tool_call>\n<function={{ c.name }}>\n" + _PARAMETER + "</function>\n</tool_call>", "\n")
    ),
    "glm": template(
        each("<tool_call>{{ c.name }}\n" + _VALUE + "</tool_call>", "\n"), _THOUGHT, "{{ '<think>\n' }}"
    ),
    "llama": template(
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        + each('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}')
    ),
    "mistral": template("[TOOL_CALLS][" + each('{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, '
                        '"id": "{{ t.id }}"}', ", ") + "]"),
    "mistral with marks": template(each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}")),
    "granite 4": template("<|tool_call|>[" + each(_JSON, ", ") + "]"),
    "deepseek v3.1": template(
        "<｜tool▁calls▁begin｜>" + each("<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
        "<｜tool▁call▁end｜>") + "<｜tool▁calls▁end｜>"
    ),
    "deepseek r1": template(
        "<｜tool▁calls▁begin｜>" + each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
        "{{ '' + c.arguments }}\n```<｜tool▁call▁end｜>", "\n") + "<｜tool▁calls▁end｜>"
    ),
    "deepseek v3.2": template(
        "\n\n<｜DSML｜function_calls>\n" + each('<｜DSML｜invoke name="{{ c.name }}">\n' + _DSML
        + "</｜DSML｜invoke>\n") + "</｜DSML｜function_calls>"
    ),
    "kimi": template(
        "<|calls_begin|>" + each("<|call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|args|>"
        "{{ c.arguments | tojson }}<|call_end|>") + "<|calls_end|>"
    ),
}  # fmt: skip
HARMONY = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}{% if m.tool_calls %}"
    "{% set c = m.tool_calls[0].function %}{{ '<|start|>assistant to=functions.' + c.name }}"
    "{{ '<|channel|>commentary json<|message|>' }}{{ c.arguments | tojson }}{{ '<|call|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
GRANITE = (
    "{% if tools %}{{ 'Respond with <|tool_call|> and a JSON list of tools.' }}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|turn|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
"""Tells how to call, and leaves the calls of messages out."""
TOKENS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|calls_begin|>", "<|call_begin|>", "<|args|>", "<|call_end|>",
    "<|calls_end|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>",
)  # fmt: skip
"""Marks that are single tokens of these models."""


def with_tokens(tokenizer: Any) -> Any:
    """A tokenizer in which the marks are tokens, special ones but for those of Qwen and GLM."""
    from tokenizers import AddedToken

    plain = TOKENS[:8]
    tokenizer.add_tokens([AddedToken(one, special=one not in plain, normalized=False) for one in TOKENS])
    return tokenizer
