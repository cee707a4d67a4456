"""Reads regular expressions of JSON schemas (ECMA 262) into trees."""

from quire.frontend.grammar.characters import ALL, Ranges, common, complement, union
from quire.frontend.grammar.pattern_tree import MAX_REPEATS, Anchor, Chars, Node, Repeat, Sequence, either

MAX_CHARACTERS = 16_384
_MAX_DEPTH = 60

_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_LINE_ENDS: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_SPACE: Ranges = [
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD, "0": 0}


class PatternError(ValueError):
    """The pattern is malformed, or more than a regular expression. The message names the place."""


class PatternReader:
    """Reads one pattern, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        if len(self._text) > MAX_CHARACTERS:
            raise PatternError(f"the pattern has more than {MAX_CHARACTERS} characters")
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("an unmatched )")
        return node

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("too many groups within groups")
        ways = [self._terms()]
        while self._skip("|"):
            ways.append(self._terms())
        self._depth -= 1
        return either(ways)

    def _terms(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _term(self) -> Node:
        atom = self._atom()
        if isinstance(atom, Anchor) or (count := self._count()) is None:
            return atom
        if self._at < len(self._text) and self._text[self._at] in "*+":
            raise self._error("a repetition of a repetition")
        return Repeat(atom, *count)

    def _count(self) -> tuple[int, int | None] | None:
        """A quantifier; a lazy one describes the same texts."""
        count = next((each for mark, each in _QUANTIFIERS.items() if self._skip(mark)), None) or self._braces()
        if count is not None:
            self._skip("?")
        return count

    def _braces(self) -> tuple[int, int | None] | None:
        """The limits of `{2}`, `{2,}` or `{2,5}`; any other brace is an ordinary character."""
        start = self._at
        if not self._skip("{"):
            return None
        least, has_comma = self._digits(), self._skip(",")
        most = self._digits() if has_comma else least
        if not self._skip("}") or (least == "" and most == ""):
            self._at = start
            return None
        if least == "" or max(len(least), len(most)) > 6:
            raise self._error("a repetition without a lower limit, or with too high a limit")
        low, high = int(least), int(most) if most else None
        if low > MAX_REPEATS or (high is not None and not low <= high <= MAX_REPEATS):
            raise self._error(f"a repetition with limits that are out of order, or over {MAX_REPEATS}")
        return low, high

    def _digits(self) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        return self._text[start : self._at]

    def _atom(self) -> Node:
        character = self._next()
        match character:
            case "^" | "$":
                return Anchor(character)
            case ".":
                return _chars(complement(_LINE_ENDS))
            case "(":
                return self._group()
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._error(f"{character} with nothing before it")
            case "{":  # nothing is before it: an ordinary character, or a mistake
                self._at -= 1
                if self._braces() is not None:
                    raise self._error("a repetition with nothing before it")
                self._at += 1
        return _chars([(ord(character), ord(character))])

    def _group(self) -> Node:
        if self._skip("?") and not self._skip(":"):
            self._skip("P")
            name = self._text[self._at :].partition(">")[0] if self._skip("<") else ""
            if not name.isidentifier():
                raise self._error("a group that looks around, or has flags")
            self._at += len(name) + 1
        node = self._alternatives()
        if not self._skip(")"):
            raise self._error("an unmatched (")
        return node

    def _escape(self) -> Node:
        character = self._next()
        if character in "AZz":  # Python's; ECMA 262 has no such escapes
            return Anchor.START if character == "A" else Anchor.END
        self._at -= 1
        return _chars(self._escaped())

    def _escaped(self) -> Ranges:
        """The characters of an escape, whose backslash has been read, in a class or not."""
        character = self._next()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else complement(ranges)
        if character in _CONTROLS:
            if character == "0" and self._digits():
                raise self._error("an octal escape")
            return [(_CONTROLS[character],) * 2]
        if character == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise self._error("\\c without a letter")
            return [(ord(letter) % 32,) * 2]
        if character in "xu":
            return [(self._code(2 if character == "x" else 4),) * 2]
        if character.isalnum():
            raise self._error(f"\\{character}, which is not supported")
        return [(ord(character),) * 2]

    def _code(self, num_digits: int) -> int:
        """A code point in hexadecimal digits, in braces or not, or in two escapes for its surrogates."""
        if num_digits == 4 and self._skip("{"):
            digits, _, _ = self._text[self._at :].partition("}")
            self._at += len(digits) + 1
        else:
            digits = self._text[self._at : self._at + num_digits]
            self._at += num_digits
            if len(digits) < num_digits:
                digits = ""
        if not digits or len(digits) > 6 or set(digits) - set("0123456789abcdefABCDEF"):
            raise self._error("an escape without its hexadecimal digits")
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and self._skip("\\u"):
            low = self._code(4)
            if not 0xDC00 <= low < 0xE000:
                raise self._error("half a surrogate pair")
            return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
        return code

    def _class(self) -> Node:
        is_negated = self._skip("^")
        ranges: Ranges = []
        while not self._skip("]"):
            low = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or low[0][0] > high[0][1]:
                    raise self._error("a range whose ends are not in order")
                ranges.append((low[0][0], high[0][1]))
            else:
                ranges += low
        return _chars(complement(ranges) if is_negated else ranges)

    def _member(self) -> Ranges:
        character = self._next()
        if character != "\\":
            return [(ord(character),) * 2]
        return [(0x8, 0x8)] if self._skip("b") else self._escaped()

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._error("an end where more is needed")
        self._at += 1
        return self._text[self._at - 1]

    def _skip(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _error(self, what: str) -> PatternError:
        return PatternError(f"the pattern has {what}, at character {self._at}")


_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def _chars(ranges: Ranges) -> Chars:
    kept = common(union(ranges), ALL)
    if not kept:
        raise PatternError("the pattern has a class without characters")
    return Chars(tuple(kept))
