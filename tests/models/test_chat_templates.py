"""Chat templates: the texts of transformers, in a number of turns."""

from __future__ import annotations

import time
from typing import Any

import pytest
from scripted import byte_level

from kvkeep.decode.prompt import encode
from kvkeep.errors import ModelError, UsageError
from kvkeep.models import chat_templates
from kvkeep.models.chat_templates import LONGEST, TURNS, TemplateTooCostly, compiled, filled

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be <brief> & 'kind'"},
    {"role": "user", "content": " one\n\n two %s {x} 🎉"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes "},
    {"role": "user", "content": ""},
]
LOOPS = (
    "{%- macro shown(m, first=false) %}{{ '<|' ~ m.role|upper ~ '|>' }}{{ m['content']|trim if first else m.content }}"
    "{%- endmacro %}{%- set ns = namespace(n=0, last='') %}{%- for m in messages if m.role != 'system' %}"
    "{%- set ns.n = ns.n + 1 %}{%- if loop.changed(m.role) and not loop.last %}{{ shown(m, first=loop.first) }}"
    "{%- elif loop.index0 % 2 == 0 %}{{ loop.cycle('a', 'b') }}{%- else %}{% continue %}{%- endif %}"
    "{%- set ns.last = ns.last + m.content[1:] %}{%- endfor %}{{ ns.n }}{{ ns.last|length }}{{ bos_token }}"
)
FILTERS = (
    "{{ messages|tojson(indent=2) }}{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')"
    "|join('|') }}{{ messages[1:]|reverse|list|last }}{{ (messages|first).content|replace('e', '3')|indent(4, true) }}"
    "{{ messages|map(attribute='role')|unique|sort|join(',') }}{{ messages[0]|dictsort }}"
    "{{ {'a': 1, 2: [3.5]}|items|list }}"
    "{{ messages|groupby('role')|length }}{{ [3, 1, 2]|sum }}{{ '%s and %03d'|format('x', 7) }}{{ 1.25|round(1) }}"
    "{{ 'ab'|center(9) }}{{ none|default('d', true) }}{{ '<b>'|e }}{{ '5'|int + 1 }}{{ [1, 2, 3]|batch(2)|list }}"
)
METHODS = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ m.get('tools', 'none') }}"
    "{{ m.content.startswith(('<', ' ')) }}{{ m.content.replace('o', '0', 1).strip() }}{% endfor %}"
    "{% for k, v in messages[0].items() %}{{ k.title() }}={{ '{:>9}|{}'.format(v, k) }}{% endfor %}"
    "{{ 'a,b'.rsplit(',', 1) }}{{ ', '.join(messages[0].keys()) }}{{ '%s %5.2f' % ('x', 1.5) }}"
    "{{ 'one' in messages[1].content }}{{ 3 ** 2 // 2 }}"
)
BLOCKS = (
    "{% macro wrap() %}[{{ caller('in') }}]{% endmacro %}{% call(x) wrap() %}{{ x }}{% endcall %}"
    "{% generation %}kept{% endgeneration %}{% set text %}<{{ messages[0].role }}>{% endset %}{{ text }}"
    "{% filter upper %}loud{% endfilter %}{% block tail %}{{ messages|length }}{% endblock %}{{ self.tail() }}"
    "{% if tools is none and documents is not none %}{% elif add_generation_prompt %}go{% endif %}"
    "{{ strftime_now('%Y') }}{{ dict(a=1)|tojson }}"
    "{% autoescape true %}{{ '<' ~ messages[0].content }}{% endautoescape %}"
)
TREE = "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }};{% endfor %}"

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop without a turn": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "back to earlier messages": "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("template", [LOOPS, FILTERS, METHODS, BLOCKS, TREE])
def test_a_text_is_that_of_transformers(template: str) -> None:
    own = byte_level().tokenizer(template)
    for talk in (TALK, TALK[1:3], TALK[:2]):
        assert filled(own, talk) == own.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_that_would_take_hours_is_stopped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "TURNS", TURNS // 10)
    own = byte_level().tokenizer(ENDLESS[kind])
    begun = time.process_time()
    with pytest.raises(TemplateTooCostly, match=r"^The model's chat template [^\n]*\.$"):
        filled(own, TALK * 1000)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'a' %}"])
def test_what_a_template_cannot_do_is_one_sentence(template: str) -> None:
    with pytest.raises(UsageError, match=r"^The model's chat template rejects this conversation \([^\n]*\.$"):
        encode(byte_level().tokenizer(template), TALK)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 3000,
        "{{ 1" + "+1" * 20000 + " }}",
        "{{ " + "9" * 65000 + " }}",
        "{% if a %}{% set x = 1 %}{% endif %}" * 2000,
    ],
)
def test_a_template_is_compiled_or_refused_soon(template: str) -> None:
    begun = time.process_time()
    with pytest.raises(ModelError):
        compiled(template)
    assert time.process_time() - begun < 5
    assert compiled(" " * LONGEST).render() == " " * LONGEST


@pytest.mark.parametrize("work", ["'a' * 10**12", "9**9**9", "'a'|center(10**12)", "1 if 9**9**9 else 2"])
def test_a_template_computes_nothing_until_it_is_filled(work: str) -> None:
    assert compiled(f"{{% if messages %}}{{{{ {work} }}}}{{% set x = {work} %}}{{% endif %}}").render() == ""
