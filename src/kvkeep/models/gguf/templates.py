"""The chat templates of a GGUF file."""

from __future__ import annotations

from jinja2 import TemplateError, meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvkeep.errors import ModelError
from kvkeep.models.gguf.keys import FileKeys

_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"

LONGEST = 1 << 18
"""Characters of a template. Those of models have thousands; a million take half a minute to compile."""


def templates_of(keys: FileKeys) -> str | dict[str, str] | None:
    """Return the chat template of a file, several by name (``default``, ``tool_use``), or None.
    Raises ModelError for one that jinja does not compile, or that needs another file."""
    named = {"default": keys.get(_KEY, str)} if _KEY in keys else {}
    keys.get(_NAMES, list)
    named |= {key.removeprefix(f"{_KEY}."): keys.get(key, str) for key in keys.starting(f"{_KEY}.")}
    for name, template in named.items():
        _check(keys, name, template)
    return named.get("default") if not named.keys() - {"default"} else named


def _check(keys: FileKeys, name: str, template: str) -> None:
    which = f"chat template '{name}'" if name != "default" else "chat template"
    if len(template) > LONGEST:
        raise ModelError(
            f"The {which} of '{keys.file}' has {len(template):,} characters, and kvkeep compiles at most {LONGEST:,}; "
            "take it out of the file."
        )
    try:
        compiled = _compile_jinja_template(template)
        other = next(meta.find_referenced_templates(compiled.environment.parse(template)), "")
    except (TemplateError, RecursionError, OverflowError, ValueError) as error:
        what = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ModelError(f"The {which} of '{keys.file}' cannot be compiled: {what}; take it out of the file.") from None
    if other != "":
        raise ModelError(
            f"The {which} of '{keys.file}' needs another file, {str(other)[:80]!r}; take it out of the file."
        )
