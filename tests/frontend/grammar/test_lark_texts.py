"""Strings that follow a client's Lark grammar, within JSON and as they are."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.core.wire.protocol import Vocabulary
from quire.executor.sampling.grammar.matcher import Matcher
from quire.executor.sampling.grammar.xgrammar_matcher import XGrammarLoader
from quire.frontend.grammar.backends.backend import GrammarError
from quire.frontend.grammar.backends.guidance_backend import GuidanceBackend
from quire.frontend.grammar.backends.xgrammar_backend import XGrammarBackend
from quire.frontend.grammar.constraint import Constraint

END = 256
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b"", b'"}', b'\\n"', b'\\"', b"*** "], [END])
XGRAMMAR = XGrammarBackend(VOCABULARY)
LOADER = XGrammarLoader(VOCABULARY)

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
"""A grammar of patches like those that coding agents send."""

SUMS = r"""
start: term (SP? ("+" | "-") SP? term)*
term: INT | "(" start ")"
SP: " "
%import common.INT
"""
TEXTS = r"""
start: (STRING | TAB | "é😀" | "\\" | "a".."c" | "Yes"i | /\w{2,3}/)+
STRING: /"[^"\\\n\x01]*"/
TAB: "\t"
"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "a patch": (
        PATCH,
        [
            '*** Begin Patch\n*** Add File: a "b".py\n+print("x\\n")\n+\n*** End Patch',
            "*** Begin Patch\n*** Update File: é\n*** Move to: b\n@@\n-a\t\n+\\\n*** End of File\n*** End Patch\n",
        ],
        ["", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n-x\n*** End Patch"],
    ),
    "nested sums": (SUMS, ["1", "1 + (2-33)", "((4))"], ["1+", "(1", "x", "1  + 2"]),
    "escapes": (
        TEXTS,
        ['"a\x02b\x1f\x7f😀"', "\t", "é😀", "\\", "cYESab_9", '\\"/"\t'],
        ["", '"a\nb"', '"a\x01"', '"\\"', "é", '"', "d", "\n"],
    ),
}


def held(definition: str, **options: Any) -> Constraint:
    text = {"type": "string", "x-lark": definition}
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return Constraint("json", json.dumps(schema), ("xgrammar", "guidance"), closed=True, **options)


def in_elements(definition: str) -> Constraint:
    """The same string in a notation that writes strings as they are."""
    schema = json.loads(held(definition).text)
    form = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    return Constraint("structural_tag", json.dumps({"format": form}), ("xgrammar",), closed=True)


def loaded(constraint: Constraint) -> Any:
    return LOADER.load(XGRAMMAR.compile(constraint))


def matcher(constraint: Constraint) -> Matcher:
    return LOADER.matcher(loaded(constraint))


def follows(started: Matcher, text: str) -> bool:
    return all(started.accept(byte) for byte in text.encode()) and started.accept(END)


def wander(started: Matcher, dice: random.Random) -> bytes:
    """A random text of a grammar."""
    out = b""
    bitmask = np.zeros((1, -(-len(VOCABULARY.tokens) // 32)), np.int32)
    while True:
        started.fill(bitmask, 0)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(VOCABULARY.tokens)]).tolist()
        if END in allowed and (len(allowed) == 1 or dice.random() < 0.3):
            return out
        token_id = dice.choice([each for each in allowed if each != END])
        assert started.accept(token_id)
        out += VOCABULARY.tokens[token_id]


def random_texts(grammar: Any, seed: int) -> Iterator[bytes]:
    """Some texts of a grammar: fewer if they are long, as patches are."""
    dice, num_bytes = random.Random(seed), 0
    for _ in range(40):
        text = wander(LOADER.matcher(grammar), dice)
        yield text
        num_bytes += len(text)
        if num_bytes > 200_000:
            return


@pytest.mark.parametrize("name", CASES)
def test_a_string_follows_its_grammar(name: str) -> None:
    definition, good, bad = CASES[name]
    for text in good:
        assert follows(matcher(held(definition)), json.dumps({"input": text}, ensure_ascii=False)), text
        element = f"<parameter=input>{text}</parameter>"
        assert follows(matcher(in_elements(definition)), element), text
    for text in bad:
        assert not follows(matcher(held(definition)), json.dumps({"input": text}, ensure_ascii=False)), text
        element = f"<parameter=input>{text}</parameter>"
        assert not follows(matcher(in_elements(definition)), element), text


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_in_json_follows_the_grammar_itself(name: str) -> None:
    definition, _, _ = CASES[name]
    alone, in_json = loaded(Constraint("grammar", definition, ("xgrammar",))), loaded(held(definition))
    for made in random_texts(in_json, 1):
        text = json.loads(made)["input"]
        assert follows(LOADER.matcher(alone), text), text


@pytest.mark.parametrize("name", CASES)
def test_all_that_the_grammar_allows_can_be_made_in_json(name: str) -> None:
    definition, _, _ = CASES[name]
    alone = loaded(Constraint("grammar", definition, ("xgrammar",)))
    in_json = loaded(held(definition, any_whitespace=False))
    for made in random_texts(alone, 2):
        text = made.decode(errors="replace")  # XGrammar alone lets halves of pairs through
        assert follows(LOADER.matcher(in_json), json.dumps({"input": text}, ensure_ascii=False))


def test_two_grammars_and_other_strings_stay_apart() -> None:
    text = [{"type": "string", "x-lark": f'start: item+\nitem: "{each}"'} for each in "ab"]
    schema = {"type": "array", "prefixItems": [*text, {"enum": ["a"]}], "items": False, "minItems": 3}
    constraint = Constraint("json", json.dumps(schema), ("xgrammar",))
    assert follows(matcher(constraint), '["aa", "bb", "a"]')
    assert not follows(matcher(constraint), '["aa", "aa", "a"]')
    assert not follows(matcher(constraint), '["aa", "bb", "aa"]')


@pytest.mark.parametrize(
    ("definition", "word"),
    [
        ("start: missing", "missing"),
        ("begin: /a/", "start"),
        ("start: /a(?=b)/", "Lookahead"),
        ("start: /a/i", "with flags"),
        ('start: t "x"\nt[lazy]: /.*<f>/', "options"),
        ("start: <[3]>", "special tokens"),
    ],
)
def test_a_grammar_that_cannot_be_held_is_refused(definition: str, word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        XGRAMMAR.compile(held(definition))


def test_other_libraries_refuse_it() -> None:
    with pytest.raises(GrammarError, match="x-lark"):
        GuidanceBackend(VOCABULARY).compile(held(SUMS))
