"""Chat templates: the texts of transformers, in a budget of steps and memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from forked import exit_codes
from scripted import byte_level

from kvkeep.decode.prompt import encode
from kvkeep.errors import ModelError, UsageError
from kvkeep.models import chat_templates
from kvkeep.models.chat_templates import BASE, CEILING, LONGEST, StepBudget, TemplateTooCostly, compiled, filled
from kvkeep.reconstruction import _words

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

_LONG = "{% set x = 'a' * 300000 %}"
_GROWN = "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}"
_GROWN += "{% set n.t = [n.t, n.t] %}{% endfor %}"
_TUPLE = "{% set n = namespace(s=(1,)) %}{% for i in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop without a turn": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "parts of a body": "{% for a in range(99999) %}" + "{% if not x %}{% endif %}" * 500 + "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "power": "{{ 9**99999999 }}",
    "products": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "constant": "{{ 'a' * 10**10 }}",
    "joined text": "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "written": _GROWN + "{{ n.s }}",
    "json": _GROWN + "{{ n.s|tojson }}",
    "format": _GROWN + "{{ '{}'.format(n.s) }}",
    "namespaces": "{% set n = namespace(s=1) %}{% for i in range(60) %}"
    "{% set n.s = [namespace(a=n.s), namespace(a=n.s)] %}{% endfor %}{{ n.s }}",
    "in itself": "{% set n = namespace() %}{% set n.s = [n] %}{{ n }}",
    "key": _TUPLE + "{{ {n.s: 1} }}",
    "center": "{{ 'a'|center(10**10) }}",
    "indent": "{{ ('a\n' * 10000)|indent(100000) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format map": "{{ ('{a:1000000000}'|safe|attr('format_map'))({'a': 1}) }}",
    "replace": _LONG + "{{ x.replace('a', x) }}",
    "join": _LONG + "{{ range(99999)|join(x) }}",
    "rfind": _LONG + "{{ x.rfind('b' ~ x[:99999]) }}",
    "slices": "{% set x = range(99999)|list %}{% for i in range(9999) %}{% set y = x[1:] %}{% endfor %}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "sum": "{{ ([[1] * 100] * 10000)|sum(start=[]) }}",
    "round": "{{ 1.5|round(4000000, 'ceil') }}",
    "bytes": "{{ (1).to_bytes(10**10, 'little') }}",
    "groups": "{{ range(99999)|groupby('real')|length }}",
    "chain": "{% set x = range(99999)" + "|map(attribute='real')" * 90 + "|list %}",
    "escape": "{% autoescape true %}{% for i in range(99999) %}{{ '&' * 9999 }}{% endfor %}{% endautoescape %}",
}  # fmt: skip


@pytest.mark.parametrize("template", [LOOPS, FILTERS, METHODS, BLOCKS, TREE])
def test_a_text_is_that_of_transformers(template: str) -> None:
    own = byte_level().tokenizer(template)
    for talk in (TALK, TALK[1:3], TALK[:2]):
        assert filled(own, talk) == own.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)


def test_a_hostile_template_is_stopped_soon_and_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tenth of the steps that every conversation has."""
    monkeypatch.setattr(chat_templates, "BASE", BASE // 10)
    own = byte_level().tokenizer(None)

    def run() -> None:
        for kind, template in HOSTILE.items():
            before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            own.chat_template = template
            with pytest.raises(TemplateTooCostly, match=r"^The model's chat template [^\n]*\.$"):
                filled(own, TALK)
            assert time.process_time() - begun < 5, kind
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000, kind

    assert exit_codes(run) == [0]


@pytest.mark.parametrize(
    "template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'a' %}", "{{ lipsum(9) }}"]
)
def test_what_a_template_cannot_do_is_one_sentence(template: str) -> None:
    with pytest.raises(UsageError, match=r"^The model's chat template does not take this conversation \([^\n]*\.$"):
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
    assert len(compiled("{{ 'a' * 10**10 }}" + " " * (LONGEST - 18)).environment.globals)


def test_steps_grow_with_a_conversation_and_end() -> None:
    assert (
        BASE < StepBudget(10, 0).allowed < StepBudget(10, 10_000).allowed < StepBudget(1000, 10_000).allowed < CEILING
    )
    assert StepBudget(10**9, 10**9).allowed == CEILING
    long = [TALK[number % 2 + 1] for number in range(1000)]
    back = "{% for m in messages %}{% for k in range(loop.index0) %}{% if not k %}{{ m.role }}{% endif %}{% endfor %}"
    back += "{% endfor %}"
    assert len(filled(byte_level().tokenizer(back), long)) > 4000


def test_every_place_that_fills_a_template_has_the_budget() -> None:
    own = byte_level().tokenizer(HOSTILE["loops"])
    for fill in (lambda: encode(own, TALK), lambda: _words(own, "a")):
        with pytest.raises(TemplateTooCostly, match="takes more than 5"):
            fill()
