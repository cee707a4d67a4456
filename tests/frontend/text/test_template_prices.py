"""An operation of a template that would make or visit too much is refused before it runs; cheap ones go on.

The bounds are small here, so what exceeds them is harmless: 1,000 characters, 100 values, integers of 200 bits.
"""

import jinja2
import pytest

from quire.frontend.text.template_bounds import Bounds, TemplateLimitError
from quire.frontend.text.template_sandbox import SandboxedTemplate

BOUNDS = Bounds(num_characters=1000, num_items=100, num_bits=200)
VARIABLES = {"text": "ab\tc " * 50, "items": ["x"] * 20, "word": "word"}


def rendered(source: str) -> str:
    return SandboxedTemplate(source, BOUNDS).render(VARIABLES)


@pytest.mark.parametrize(
    "expression",
    [
        "2 ** 201",
        "(2 ** 150) * (2 ** 150)",
        "word * 251",
        "251 * word",
        "items * 6",
        "(items + items + items) + (items + items + items)",
        "text + text + text + text + text",
        "text ~ text ~ text ~ text ~ text",
        "word.zfill(1001)",
        "word.ljust(1001)",
        "word.rjust(width=1001)",
        "word.center(1001)",
        "text.expandtabs(50)",
        "text.replace('a', 'x' * 100)",
        "word.translate({119: text, 111: text, 114: text, 100: text, 0: text * 4})",
        "text.join(items)",
        "text.split('b' ~ '') + text.split() + text.split(' ')",
        "(text * 3).split('a')",
        "(text * 4).split()",
        "('x\n' * 200).splitlines()",
        "(1).to_bytes(1001, 'little')",
        "word.encode().zfill(1001)",
        "'%1001d' % 1",
        "'%600d%600d' % (1, 2)",
        "'%.1001f' % 1",
        "'%*d' % (1001, 1)",
        "'%s%s%s%s%s' % (text, text, text, text, text)",
        "('%(a)s' * 5) % {'a': text}",
        "'{:1001}'.format(1)",
        "'{:{}}'.format(1, 1001)",
        "('{0}' * 5).format(text)",
        "'{a:600}{a:600}'.format_map({'a': 1})",
        "items | batch(101, 'x') | list",
        "items | slice(101) | list",
        "word | center(1001)",
        "text | indent(1001)",
        "'%1001d' | format(1)",
        "word | replace('w', 'x' * 999)",
        "text | replace('a', 'x' * 100)",
        "word | wordwrap(1, wrapstring='x' * 500)",
        "items | join(text)",
        "items | map('upper') | join(text)",
        "text | list",
        "1.5 | round(401, 'floor')",
        "('f' * 100) | int(0, 16)",
        "[items, items] | sum(start=[])",
        "items | tojson(indent=500)",
        "[[items, items], [items, items], [items, items]]",
        "{'a': [items, items, items, items, items, items]}",
        "(items, items, items, items, items, items)",
        "[text, text, text, text]",
        "dict(a=[items, items, items], b=[items, items, items]) | string",
    ],
)
def test_what_would_cost_too_much_is_refused(expression: str) -> None:
    with pytest.raises(TemplateLimitError):
        rendered("{{ " + expression + " }}")


@pytest.mark.parametrize(
    "use",
    ["{{ ns.a }}", "{{ ns.a == ns.b }}", "{{ ns.a | tojson }}", "{{ ns.a ~ '' }}", "{{ '%s' % (ns.a,) }}", "{{ ns }}"],
)
def test_values_that_share_parts_are_counted_each_time(use: str) -> None:
    """Seven lines would double a list to 128 values, and thirty to a thousand million."""
    double = "{% set ns = namespace(a=[1], b=[1]) %}" + "{% set ns.a = ns.a + ns.a %}{% set ns.b = ns.b + ns.b %}" * 6
    with pytest.raises(TemplateLimitError):
        rendered(double + "{% set ns.a = [ns.a] + [ns.a] %}{% set ns.b = [ns.b] + [ns.b] %}" + use)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2 ** 100", str(2**100)),
        ("(-1) ** 99999999999999", "-1"),
        ("2.0 ** 3", "8.0"),
        ("2 ** -1", "0.5"),
        ("word.zfill(8)", "0000word"),
        ("word.ljust(6) ~ '|'", "word  |"),
        ("text.count('a')", "50"),
        ("'a\tb'.expandtabs(4)", "a   b"),
        ("word.replace('w', 'l', 1)", "lord"),
        ("word.translate({119: 'l'})", "lord"),
        ("'-'.join(['a', 'b'])", "a-b"),
        ("'-'.join(['a', 'b'] | map('upper'))", "A-B"),
        ("'%5.1f%%' % 2.25", "  2.2%"),
        ("'%(a)s and %(a)s' % {'a': 1}", "1 and 1"),
        ("'{:>5}{a}'.format(1, a=2)", "    12"),
        ("'{0[a]}'.format({'a': 1})", "1"),
        ("'{a}'.format_map({'a': 1})", "1"),
        ("[1, 2, 3] | batch(2, 0) | list", "[[1, 2], [3, 0]]"),
        ("[1, 2, 3] | slice(2) | list", "[[1, 2], [3]]"),
        ("word | center(8) ~ '|'", "  word  |"),
        ("'a\nb' | indent(2)", "a\n  b"),
        ("'%03d' | format(7)", "007"),
        ("[{'a': 'x'}, {'a': 'y'}] | join(', ', attribute='a')", "x, y"),
        ("[1, 2] | sum", "3"),
        ("[{'a': 2}] | sum('a')", "2"),
        ("2.567 | round(2)", "2.57"),
        ("'ff' | int(0, 16)", "255"),
        ("{'a': [1, 2]} | tojson(indent=1)", '{\n "a": [\n  1,\n  2\n ]\n}'),
        ("[1, [2, word]] == [1, [2, 'word']]", "True"),
        ("word in ['word', items]", "True"),
        ("'a b  c'.split()", "['a', 'b', 'c']"),
        ("nothing", ""),
    ],
)
def test_what_costs_little_is_as_jinja_has_it(expression: str, text: str) -> None:
    source = "{{ " + expression + " }}"
    assert rendered(source) == text
    assert jinja2.Environment().from_string(source).render(VARIABLES) == text or "tojson" in source


def test_loops_unpack_and_assign_as_ever() -> None:
    source = "{% for a, b in [(1, 2), (3, word)] %}{% set c, d = b, a %}{{ c }}{{ d }};{% endfor %}"
    assert rendered(source) == "21;word3;"
