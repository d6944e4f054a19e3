"""Which rows of an input are wanted: `--where "lang == 'en' and score > 0.5"`, parsed and decided.

    parse(text) -> Condition        from BuildOptions.where; nothing of it is ever run as code
    condition.decide(row)           one row as Python has it: a JSON line that Arrow refuses
    columns.verdicts(...)           whole columns, by Arrow's compute functions

Logic has three values, as in SQL: what is compared with a null, or with a field that is missing or
of another type, is neither true nor false. A row is used where the whole condition is true; those
for which it is neither are counted apart. Both ways to decide must agree: tests compare them.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Literal: TypeAlias = "str | int | float | bool"

# What the values of a column are compared with, and so what they have to be.
TEXT, NUMBER, FLAG = "text", "a number", "true or false"
# Numbers of JSON are floats here; below this they are exact.
LARGEST_INTEGER = 2**53

# A verdict on a row.
KEPT, LEFT_OUT, UNDECIDED = 1, 0, -1

_OPERATORS = ("==", "!=", "<=", ">=", "<", ">")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_SAME = {"=": "==", "<>": "!="}
_HINT = (
    "such as: --where \"lang == 'en' and score > 0.5\"; there are == != < <= > >=, in, like, "
    "is null, and, or, not and parentheses; text stands in single quotes"
)


def _kind_of(value: Literal) -> str:
    if isinstance(value, bool):
        return FLAG
    return TEXT if isinstance(value, str) else NUMBER


def _shown(value: Literal) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return json.dumps(value)


# -------------------------------------------------------------------------------------------------
# What a condition is made of.


@dataclass(frozen=True, slots=True)
class Test:
    """A column and what is asked of it."""

    column: str
    # One of the operators, "in", "like", "is null", or "is true" where a column stands alone.
    operator: str
    values: tuple[Literal, ...] = ()

    def __str__(self) -> str:
        column = self.column if _PLAIN_NAME.fullmatch(self.column) else f'"{self.column}"'
        if self.operator == "is null":
            return f"{column} is null"
        if self.operator == "is true":
            return column
        shown = ", ".join(map(_shown, self.values))
        return f"{column} {self.operator} {f'({shown})' if self.operator == 'in' else shown}"

    def tests(self) -> Iterator[Test]:
        yield self

    @property
    def kind(self) -> str | None:
        """What a value has to be; None where anything will do."""
        if self.operator == "is null":
            return None
        return FLAG if self.operator == "is true" else _kind_of(self.values[0])

    def decide(self, row: dict[str, Any]) -> bool | None:
        value = _value(row, self.column)
        if self.operator == "is null":
            return value is None
        kinds = {TEXT: str, FLAG: bool, NUMBER: (int, float)}
        kind = self.kind
        assert kind is not None
        is_other = isinstance(value, bool) and kind != FLAG
        if value is None or is_other or not isinstance(value, kinds[kind]):  # type: ignore[arg-type]
            return None
        if kind == TEXT and not _is_unicode(value):
            return None
        return _asked(self, value)


@dataclass(frozen=True, slots=True)
class Not:
    part: Part

    def __str__(self) -> str:
        return f"not {_in_brackets(self.part)}"

    def tests(self) -> Iterator[Test]:
        yield from self.part.tests()

    def decide(self, row: dict[str, Any]) -> bool | None:
        found = self.part.decide(row)
        return None if found is None else not found


@dataclass(frozen=True, slots=True)
class Several:
    """Parts that are joined by "and" or by "or"."""

    joint: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f" {self.joint} ".join(map(_in_brackets, self.parts))

    def tests(self) -> Iterator[Test]:
        for part in self.parts:
            yield from part.tests()

    def decide(self, row: dict[str, Any]) -> bool | None:
        found = [part.decide(row) for part in self.parts]
        settled = self.joint == "or"
        if settled in found:
            return settled
        return None if None in found else not settled


Part: TypeAlias = Test | Not | Several


def _in_brackets(part: Part) -> str:
    return f"({part})" if isinstance(part, Several) else str(part)


def _asked(test: Test, value: Any) -> bool:
    """What is asked of a value of the right kind."""
    match test.operator:
        case "is true":
            return bool(value)
        case "in":
            return value in test.values
        case "like":
            return like_rule(str(test.values[0])).fullmatch(value) is not None
    (other,) = test.values
    compared: dict[str, Callable[[], bool]] = {
        "==": lambda: value == other,
        "!=": lambda: value != other,
        "<": lambda: value < other,
        "<=": lambda: value <= other,
        ">": lambda: value > other,
        ">=": lambda: value >= other,
    }
    return compared[test.operator]()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(64)
def like_rule(pattern: str) -> re.Pattern[str]:
    """A pattern of `like`: % is any text, _ any character, and a backslash takes that away."""
    wild = {"%": ".*", "_": "."}
    pieces = re.findall(r"\\[%_\\]|.", pattern, re.DOTALL)
    rule = "".join(
        re.escape(piece[1:]) if len(piece) > 1 else wild.get(piece, re.escape(piece))
        for piece in pieces
    )
    return re.compile(rule, re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """A whole condition. Its text is the same however it was written."""

    whole: Part

    def __str__(self) -> str:
        return str(self.whole)

    @property
    def columns(self) -> dict[str, str | None]:
        """The columns, and what their values have to be; None where nobody asks."""
        found: dict[str, str | None] = {}
        for test in self.whole.tests():
            found[test.column] = found.get(test.column) or test.kind
        return found

    def decide(self, line: bytes) -> int | None:
        """The verdict on a JSON line; None where it is nested too deeply for Python.

        What is no object stays, to be rejected.
        """
        try:
            row = row_of(line)
        except RecursionError:
            return None
        return KEPT if row is None else self.verdict(row)

    def verdict(self, row: dict[str, Any]) -> int:
        found = self.whole.decide(row)
        return UNDECIDED if found is None else KEPT if found else LEFT_OUT


# Numbers as Arrow has them; int() would refuse those of many digits.
_DECODER = json.JSONDecoder(parse_int=float)


def row_of(line: bytes) -> dict[str, Any] | None:
    """The object of a JSON line; None where it is something else."""
    try:
        row = _DECODER.decode(line.decode().strip())
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def has(row: dict[str, Any], column: str) -> bool:
    """Whether the row has the field, be it null."""
    return _value(row, column, missing=_MISSING) is not _MISSING


_MISSING: Any = object()


def _value(row: dict[str, Any], column: str, *, missing: Any = None) -> Any:
    from tokenmill.records import field_of  # whose numpy takes a while, and options are read first

    try:
        return field_of(row, column)
    except KeyError:
        return missing


def unknown_column(column: str, names: Sequence[str]) -> tuple[str, str]:
    """What to say, and to hint, of a column that is not among the names."""
    near = difflib.get_close_matches(column, names, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    problem = f"no column {column!r}, which --where asks for"
    hint = "correct the name in --where; one with blanks or signs stands in double quotes"
    return f"{problem}; there are: {', '.join(names) or 'none'}", f"{meant}{hint}"


# -------------------------------------------------------------------------------------------------
# The parser: words, then what they mean, from "or" down to a single test.

_PLAIN_NAME = re.compile(r"[^\W\d]\w*(\.\w+)*")
_WORD = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w))
    |(?P<name>[^\W\d]\w*(?:\.\w+)*)
    |"(?P<quoted>[^"]+)"
    |`(?P<ticked>[^`]+)`
    |'(?P<text>(?:[^']|'')*)'
    |(?P<sign>==|!=|<>|<=|>=|<|>|=|\(|\)|\[|\]|,)
    )""",
    re.VERBOSE,
)
_KEYWORDS = {"and", "or", "not", "in", "like", "is", "null", "true", "false"}
_MOST_DEPTH = 50


@lru_cache(16)
def parse(text: str) -> Condition:
    """The condition of a text; UsageError says where it is none."""
    parser = _Parser(text)
    condition = Condition(parser.parse())
    kinds: dict[str, str] = {}
    for test in condition.whole.tests():
        kind = test.kind
        if kind is not None and kinds.setdefault(test.column, kind) != kind:
            parser.refuse(f"{test.column!r} is compared with {kinds[test.column]} and with {kind}")
    return condition


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._words: list[tuple[str, Any]] = []
        self._at = self._depth = 0
        at = 0
        while at < len(text.rstrip()):
            found = _WORD.match(text, at)
            if found is None or found.lastgroup is None:
                self.refuse(f"{text[at:].strip()[:20]!r} is not understood")
            kind, value = found.lastgroup, found[found.lastgroup]
            if kind == "name" and value.lower() in _KEYWORDS:
                kind, value = "keyword", value.lower()
            kind = "column" if kind in ("name", "quoted", "ticked") else kind
            self._words.append((kind, value))
            at = found.end()

    def refuse(self, problem: str) -> NoReturn:
        raise UsageError(f"where={self._text!r} is no condition: {problem}", hint=_HINT)

    def parse(self) -> Part:
        found = self._several("or")
        if self._at < len(self._words):
            self.refuse(f"{self._words[self._at][1]!r} is not expected there")
        return found

    def _next(self) -> tuple[str, Any]:
        if self._at == len(self._words):
            return "end", "its end"
        return self._words[self._at]

    def _takes(self, *words: str) -> bool:
        kinds = [*self._words[self._at : self._at + len(words)]]
        fits = len(kinds) == len(words) and all(
            kind in ("keyword", "sign") and value == word
            for (kind, value), word in zip(kinds, words, strict=True)
        )
        self._at += len(words) if fits else 0
        return fits

    def _several(self, joint: str) -> Part:
        below = self._single if joint == "and" else lambda: self._several("and")
        parts = [below()]
        while self._takes(joint):
            parts.append(below())
        return parts[0] if len(parts) == 1 else Several(joint, tuple(parts))

    def _single(self) -> Part:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            self.refuse(f"it is nested more than {_MOST_DEPTH} deep")
        try:
            if self._takes("not"):
                return Not(self._single())
            if self._takes("("):
                found = self._several("or")
                if not self._takes(")"):
                    self.refuse("a parenthesis is not closed")
                return found
            return self._test()
        finally:
            self._depth -= 1

    def _test(self) -> Part:
        kind, name = self._next()
        if kind != "column":
            return self._flipped()
        self._at += 1
        if self._takes("is", "not", "null"):
            return Not(Test(name, "is null"))
        if self._takes("is", "null"):
            return Test(name, "is null")
        if self._takes("not", "in"):
            return Not(Test(name, "in", self._list()))
        if self._takes("in"):
            return Test(name, "in", self._list())
        if self._takes("not", "like"):
            return Not(self._like(name))
        if self._takes("like"):
            return self._like(name)
        operator = self._operator()
        return Test(name, "is true") if operator is None else self._compared(name, operator)

    def _flipped(self) -> Part:
        value = self._literal()
        operator = self._operator()
        kind, name = self._next()
        if operator is None or kind != "column":
            self.refuse(f"no column is compared with {_shown(value)}")
        self._at += 1
        return self._compare(name, _FLIPPED.get(operator, operator), value)

    def _operator(self) -> str | None:
        kind, value = self._next()
        operator = _SAME.get(value, value)
        if kind != "sign" or operator not in _OPERATORS:
            return None
        self._at += 1
        return str(operator)

    def _compared(self, name: str, operator: str) -> Part:
        kind, other = self._next()
        if kind == "column":
            self.refuse(
                f"{name!r} and {other!r} are both columns, and a column is compared with a value; "
                f"text stands in single quotes: '{other}'"
            )
        return self._compare(name, operator, self._literal())

    def _compare(self, name: str, operator: str, value: Literal) -> Part:
        if isinstance(value, bool) and operator not in ("==", "!="):
            self.refuse(f"true and false have no order, which {operator} asks for")
        if self._operator() is not None:
            self.refuse("one comparison follows another; join two of them with and")
        return Test(name, operator, (value,))

    def _like(self, name: str) -> Test:
        value = self._literal()
        if not isinstance(value, str):
            self.refuse(f"{name!r} is to be like {_shown(value)}, which is no text")
        return Test(name, "like", (value,))

    def _list(self) -> tuple[Literal, ...]:
        closing = ")" if self._takes("(") else "]" if self._takes("[") else None
        if closing is None:
            self.refuse("in takes a list in parentheses, such as ('en', 'de')")
        values = [self._literal()]
        while self._takes(","):
            values.append(self._literal())
        if not self._takes(closing):
            self.refuse("the list after in is not closed")
        if len(kinds := dict.fromkeys(map(_kind_of, values))) > 1:
            self.refuse(f"the list after in has {' and '.join(kinds)}")
        return tuple(values)

    def _literal(self) -> Literal:
        kind, value = self._next()
        self._at += 1
        if kind == "number":
            return self._number(value)
        if kind == "keyword" and value in ("true", "false"):
            return bool(value == "true")
        if kind == "keyword" and value == "null":
            self.refuse("nothing equals null; write: is null")
        if kind != "text":
            self.refuse(f"a value was expected, and not {value!r}")
        text = str(value).replace("''", "'")
        if not _is_unicode(text):
            self.refuse("it has text that is not Unicode")
        return text

    def _number(self, text: str) -> int | float:
        if re.fullmatch(r"[-+]?\d{1,20}", text):
            number = int(text)
            if abs(number) >= LARGEST_INTEGER:
                self.refuse(
                    f"{text} is larger than numbers of JSON are exact ({LARGEST_INTEGER:,})"
                )
            return number
        value = float(text)
        if math.isinf(value):
            self.refuse(f"{text} is too large")
        return value


def combine(
    part: Part,
    of_test: Callable[[Test], Any],
    *,
    invert: Callable[[Any], Any],
    join: Mapping[str, Callable[[Any, Any], Any]],
) -> Any:
    """The value of a condition, from those of its tests: how columns are decided."""
    if isinstance(part, Test):
        return of_test(part)
    more = {"invert": invert, "join": join}
    if isinstance(part, Not):
        return invert(combine(part.part, of_test, **more))  # type: ignore[arg-type]
    first, *others = (combine(each, of_test, **more) for each in part.parts)  # type: ignore[arg-type]
    for other in others:
        first = join[part.joint](first, other)
    return first
