"""The chat templates of a GGUF file."""

from __future__ import annotations

from jinja2 import meta

from kvkeep.errors import ModelError
from kvkeep.models.chat_templates import compiled
from kvkeep.models.gguf.keys import FileKeys

_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"


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
    try:
        environment = compiled(template).environment
    except ModelError as error:
        raise ModelError(
            f"The {which} of '{keys.file}' cannot be compiled: {error}; take it out of the file."
        ) from None
    other = next(meta.find_referenced_templates(environment.parse(template)), "")
    if other != "":
        raise ModelError(
            f"The {which} of '{keys.file}' needs another file, {str(other)[:80]!r}; take it out of the file."
        )
