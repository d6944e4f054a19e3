"""Where chat templates run: Jinja's sandbox as transformers sets it up, with limits.

A template is code of strangers. Jinja's sandbox keeps it away from everything but plain values; the
limits here keep it from taking all memory or never ending. They count, and no clock is read for
them, so that a row is rejected on every machine or on none:

    sizes   characters and entries of all that the template makes, whether it is kept or not
    steps   nodes of the template that are run: a loop costs its length times what is in it
    depth   macros and recursive loops within each other

What a size will be is worked out before it is made, for everything that can make more than it is
given: operators, methods, filters. A list or an object counts with all that is in it, so that one
that holds another twice is twice as large, and what has no end to it can never be made.

A template sees what transformers gives it, with one exception: today's date, since a store may not
depend on the day it was made. `strftime_now` exists only where a date is given, and tells that one.
This is the home of Jinja, and is imported where a template is to run.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tokenmill.errors import BuildError, TokenizerError, UsageError
from tokenmill.records import RejectReason
from tokenmill.supervised.chat import GENERATION, PROMPT, common_start
from tokenmill.supervised.rows import Conversation, RowError, nesting

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator, Mapping

# What a template may make, run and nest for any conversation, and more of it for each character
# of the one at hand.
SIZES, STEPS, DEPTH = 16 << 20, 16 << 20, 60
SIZES_PER_CHARACTER, STEPS_PER_CHARACTER = 32, 64
# A rendering that takes longer in spite of all limits ends its unit; after so many steps the clock
# is looked at.
SECONDS, STEPS_AT_ONCE = 600, 1 << 18
PARTS_AT_ONCE = 1 << 16
MOST_AT_ONCE = 5  # values that are put together before it is counted what that makes
MOST_CHARACTERS = 1 << 20
_BLOCKS, _MESSAGES = "generation blocks", "messages"
_TWO_ANSWERS = ("\ue000", "\ue001")
_REASONING = "<think>"
_ENTRY = 8  # what an entry of a list counts
_WIDEST = 9999
_DICT_METHODS = frozenset(dir(dict))
# Methods that no chat needs, and whose results are not easily told in advance.
_UNSAFE = {"encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromkeys"}
# Filters for web pages and debugging, and one that would give another store every time.
_ABSENT = {"forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"}
# Methods and filters that can make more than they are given: `Sandbox._before` has a rule for each.
_RULED = {"list", "sort", "unique", "map", "batch", "slice", "center", "ljust", "rjust", "zfill"}
_RULED |= {"split", "rsplit", "splitlines", "partition", "rpartition", "expandtabs", "indent"}
_RULED |= {"tojson", "replace", "join", "format", "round", "sum"}
# Filters that give what is there already.
_TAKING = {"default", "d", "first", "last", "attr", "min", "max"}
_COMPARING = {"in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="}
_COMPARING |= {"gt", ">", "greaterthan", "ge", ">=", "lower", "upper"}


class TemplateLimit(Exception):  # noqa: N818 (Jinja's filters catch errors of most other kinds)
    """A template goes beyond a limit; its text says which."""


def weight(value: object, *, most: int = 1 << 60) -> int:
    """Characters and entries of a value with all that is in it, counted until they are too many."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        total += _ENTRY
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            left += one
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, and its limits."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, date: datetime.date | None) -> None:
        extensions = [_GenerationBlocks, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.macro_cost = 1  # nodes of the largest macro
        self.begin(None)

        def raise_exception(message: object) -> None:
            raise jinja2.TemplateError(str(message))

        def strftime_now(pattern: str) -> str:
            if len(pattern) > _WIDEST or re.search(r"%[-_0^#+]*[1-9]", pattern):
                raise TemplateLimit("a date is written with a width")
            assert date is not None
            return date.strftime(pattern)

        self.globals |= {"raise_exception": raise_exception, "namespace": _Namespace}
        del self.globals["lipsum"]  # text by chance
        if date is not None:
            self.globals["strftime_now"] = strftime_now
        self.filters["tojson"] = _tojson
        filters = {name: f for name, f in self.filters.items() if name not in _ABSENT}
        self.filters = {name: self._limited(name, function) for name, function in filters.items()}
        # What `_Counting` writes into a template; no expression can have such a name.
        for method in (self.built, self.part, self.compared, self.made, self.loop, self.turn):
            self.filters[f" {method.__name__}"] = method
        for name in _COMPARING:
            self.tests[name] = self._limited_test(self.tests[name])

    def begin(self, row: Conversation | None, *, tracked: str | None = None) -> list[str]:
        """Count anew, for the rendering of a row; returns the list for what it writes."""
        self._row, self._depth, self._deadline = row, 0, 0.0
        self._sizes = SIZES
        self._steps = self._allowed = STEPS
        self._next_look = STEPS - STEPS_AT_ONCE
        self.tracked = tracked
        self.notes: list[tuple[int, str]] = []
        self.looped: list[Any] = []
        self._parts: list[str] = []
        self._noted_parts = self._noted_length = 0
        return self._parts

    def note(self, said: str = "") -> None:
        """Note how many characters were written before this."""
        self._noted_length += sum(map(len, self._parts[self._noted_parts :]))
        self._noted_parts = len(self._parts)
        self.notes.append((self._noted_length, said))

    def make(self, size: int) -> None:
        """Count what is about to be made."""
        self._sizes -= size
        if self._sizes < 0:
            self._look()

    def step(self, cost: int) -> None:
        """Count what is about to be run."""
        self._steps -= cost
        if self._steps < self._next_look:
            self._look()

    @property
    def taken(self) -> int:
        """Steps that this rendering has taken."""
        return self._allowed - self._steps

    def _look(self) -> None:
        """Look whether a limit is reached; the size of the row itself is counted if one is."""
        if self._row is not None and (self._sizes < 0 or self._steps < 0):
            row, self._row = self._row, None
            size = weight([row.messages, row.tools, row.variables])
            self._sizes += SIZES_PER_CHARACTER * size
            self._steps += STEPS_PER_CHARACTER * size
            self._allowed += STEPS_PER_CHARACTER * size
        if self._sizes < 0:
            raise TemplateLimit(
                f"the template makes more than {SIZES:,} characters and {SIZES_PER_CHARACTER} for"
                " each of the row"
            )
        if self._steps < 0:
            raise TemplateLimit(
                f"the template takes more than {STEPS:,} steps and {STEPS_PER_CHARACTER} for"
                " each character of the row"
            )
        self._next_look = max(self._steps - STEPS_AT_ONCE, 0)
        now = time.monotonic()
        self._deadline = self._deadline or now + SECONDS
        if now > self._deadline:
            raise BuildError(
                f"a chat template took more than {SECONDS} seconds for one row; whether it ends at"
                " all cannot be known",
                hint="look for loops within loops in it, or give another one: --chat-template",
            )

    # What `_Counting` has a template call. With a context it is not worked out while compiling.

    @pass_context
    def built(self, _context: Any, value: Any) -> Any:
        """A list or an object that the template has put together."""
        self.make(weight(value, most=max(self._sizes, 0) or 1 << 60))
        return value

    @pass_context
    def part(self, _context: Any, value: Any) -> Any:
        """A slice."""
        self.make(len(value) * (1 if isinstance(value, str) else _ENTRY))
        return value

    @pass_context
    def compared(self, _context: Any, value: Any) -> Any:
        """What something is compared with, or looked for in."""
        if isinstance(value, str):
            self.step(len(value) >> 4)
        elif isinstance(value, list | tuple):
            self.step(weight(value))
        return value

    @pass_context
    def made(self, _context: Any, value: Any) -> Any:
        """What was put together of a few values, or came from a method or a filter."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, list | tuple | dict):
            self.built(None, value)
        return value

    @pass_context
    def loop(self, _context: Any, values: Any, cost: int) -> Any:
        """What a loop goes through."""
        if type(cost) is not int or cost < 1:  # the filter map takes names as strings
            raise TemplateLimit("a loop costs something")
        if hasattr(values, "__len__"):
            self.step(len(values) * cost + 1)
            return values
        # The loop itself will say so where it is nothing to go through.
        return _Counted(values, self, cost) if hasattr(values, "__next__") else values

    @pass_context
    def turn(self, _context: Any, value: Any) -> Any:
        """A message that is about to be written, or none after the last one."""
        if self.tracked == _MESSAGES:
            self.note()
            self.looped.append(value)
        return value

    # What Jinja calls.

    def concat(self, parts: Any) -> str:
        """What a block or a macro wrote."""
        self.make(sum(map(len, parts)))
        return "".join(parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # A dict's members come after its attributes; for most names it has none such.
        if type(obj) is dict and attribute in obj and attribute not in _DICT_METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        times, what = (left, right) if isinstance(left, int) else (right, left)
        are_numbers = isinstance(what, int) and isinstance(times, int)
        if operator == "*":
            if are_numbers:
                self._check_digits(what.bit_length() + times.bit_length())
            elif isinstance(what, str | list | tuple) and isinstance(times, int):
                self.make(max(times, 0) * weight(what))
        elif operator == "**" and are_numbers:
            self._check_digits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, "%", right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(value)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._check_format(value.__self__, "{", (args, kwargs))
            return wrapped(*args, **kwargs)

        return limited

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._depth >= DEPTH:
            raise TemplateLimit(f"the template recurses more than {DEPTH} deep")
        self._depth += 1
        if isinstance(obj, Macro) or getattr(obj, "__func__", None) is _GenerationBlocks._note:
            # The template's own: as safe as the template, and what it makes was counted.
            self.step(self.macro_cost)
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            made = obj(*args, **kwargs)
            self._depth -= 1
            return made
        self.step(4)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self.step(len(owner) >> 4)
            if obj.__name__ in _RULED:
                args = self._before(obj.__name__, (owner, *args), kwargs, values=1)[1:]
        elif isinstance(obj, LoopContext):
            args = (self.loop(context, args[0], self.macro_cost), *args[1:])
        made = super().call(context, obj, *args, **kwargs)
        self._depth -= 1
        # What an object holds was there before.
        return made if isinstance(owner, dict) else self.made(None, made)

    # How much there will be.

    def _limited(self, name: str, function: Any) -> Any:
        """A filter that counts."""
        own = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            value = args[own]
            if isinstance(value, str | list | tuple | dict):
                self.step(len(value) >> 4)
            if name in _RULED:
                args = (*args[:own], *self._before(name, args[own:], kwargs, values=0))
            made = function(*args, **kwargs)
            if name in _TAKING:
                return made
            if hasattr(made, "__next__"):
                # What comes one by one may come from what comes one by one, and so on.
                return _Counted(made, self, 1, nested=getattr(value, "nested", 0))
            return self.made(None, made)

        return limited

    def _limited_test(self, function: Any) -> Any:
        """A test that counts."""

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                self.compared(None, value)
            return function(*args, **kwargs)

        return limited

    def _before(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, values: int
    ) -> tuple[Any, ...]:
        """Count what a method or a filter adds to what it is given; returns what to give it.

        `values` is the place of what `join` puts together: a method has it after the separator.
        """
        value, rest = args[0], (*args[1:], *kwargs.values())
        match name:
            case "split" | "rsplit" | "splitlines" | "partition" | "rpartition":
                self.make(4 * len(value))
            case "list" | "sort" | "unique" | "map" | "batch" | "slice":
                self.make(_ENTRY * len(value) if hasattr(value, "__len__") else 0)
                if name in ("batch", "slice"):
                    self.make(_ENTRY * _widest(rest))
            case "center" | "ljust" | "rjust" | "zfill":
                self.make(_widest(rest))
            case "expandtabs":
                self.make(_widest((8, *rest)) * value.count("\t"))
            case "indent":
                if not isinstance(value, str):  # Jinja would add a line to a list, in its place
                    raise TemplateLimit("the filter indent is for texts")
                self.make(_widest((4, *rest)) * (value.count("\n") + 2))
            case "tojson":
                size, width = weight(value), sum(map(_width, rest))
                self.make(size + size // _ENTRY * width * (nesting(value) if width else 0))
            case "replace":
                old, new = (*args[1:], kwargs.get("old"), kwargs.get("new"))[:2]
                more = len(str(new)) - len(str(old))
                self.make(max(more, 0) * str(value).count(str(old)))
            case "join":
                separator = str((*args, kwargs.get("d", ""))[1 - values])
                args = (*args[:values], _listed(args[values]), *args[values + 1 :])
                self.make(weight(args[values]) + len(separator) * len(args[values]))
            case "format":
                self._check_format(str(value), "%", rest)
            case "round":
                self._check_digits(4 * _widest(rest))
            case "sum":
                if not all(isinstance(each, int | float | str | None) for each in rest):
                    raise TemplateLimit("the filter sum adds up numbers alone")
        return args

    def _check_digits(self, bits: int) -> None:
        if bits > 4 * _WIDEST:
            raise TemplateLimit(f"the template makes a number of more than {_WIDEST:,} digits")

    def _check_format(self, text: str, mark: str, values: Any) -> None:
        """A string that says itself how wide its fields are."""
        if mark == "%":
            fields = re.findall(r"%(?:\([^)]*\))?([-+ #0-9.*]*)", text)
            is_unknown = any("*" in one for one in fields)
        else:
            plain = text.replace("{{", "").replace("}}", "")
            fields = re.findall(r"\{[^{}]*\}", plain)
            is_unknown = re.search(r"\{[^{}]*\{", plain) is not None
        widths = [len(number) for one in fields for number in re.findall(r"\d+", one)]
        if is_unknown or any(width > len(str(_WIDEST)) for width in widths):
            raise TemplateLimit(f"a field of a format is more than {_WIDEST:,} wide")
        one = weight(values) + (_WIDEST if widths else 0)
        self.make(len(text) + len(fields) * one)


def _width(value: object) -> int:
    """How much wider a number, or a text or two that are in its place, can make something."""
    if isinstance(value, tuple):
        return sum(map(_width, value))
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def _widest(values: tuple[Any, ...]) -> int:
    return max(map(_width, values), default=0)


def _listed(values: Any) -> Any:
    return values if isinstance(values, list | tuple | dict | str) else list(values)


class _Counted:
    """Values that a filter gives one by one, each of which is a step."""

    def __init__(self, values: Any, sandbox: Sandbox, cost: int, *, nested: int = 0) -> None:
        self._values, self._sandbox, self._cost = values, sandbox, cost
        self.nested = nested + 1
        if self.nested > DEPTH:
            raise TemplateLimit(f"the template nests filters more than {DEPTH} deep")

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self._sandbox.step(self._cost)
        return next(self._values)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        # Two that hold each other twice would be a text without end.
        raise TemplateLimit("a namespace is no text")


class _GenerationBlocks(jinja2.ext.Extension):
    """The tag that encloses what an assistant says, as transformers defines it."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)
    environment: Sandbox

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> Any:
        said = caller()
        if self.environment.tracked == _BLOCKS:
            self.environment.note(str(said))
        return said


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would write < > & ' as escapes, for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Counting(NodeTransformer):
    """Has a template call the sandbox where it would make or go through values without it."""

    def __init__(self, main: nodes.For | None) -> None:
        self._main = main

    def _told(self, name: str, first: Any, *more: Any) -> nodes.Filter:
        return nodes.Filter(first, f" {name}", list(more), [], None, None)

    def visit_List(self, node: Any) -> Any:  # noqa: N802
        node = self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._told("built", node)

    visit_Dict = visit_Tuple = visit_List  # noqa: N815

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        node = self.generic_visit(node)
        return self._told("part", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Operand(self, node: Any) -> Any:  # noqa: N802
        node = self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = self._told("compared", node.expr)
        return node

    # Of a few values it is counted afterwards what they make.

    def visit_Add(self, node: Any) -> Any:  # noqa: N802
        terms = []
        while isinstance(node, nodes.Add):
            terms.append(self.visit(node.right))
            node = node.left
        total = self.visit(node)
        for number, term in enumerate(reversed(terms), start=1):
            total = nodes.Add(total, term)
            if number % MOST_AT_ONCE == 0 or number == len(terms):
                total = self._told("made", total)
        return total

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        terms = list(map(self.visit, node.nodes))
        while sum(not isinstance(each, nodes.Const) for each in terms) > MOST_AT_ONCE:
            groups = [terms[i : i + MOST_AT_ONCE] for i in range(0, len(terms), MOST_AT_ONCE)]
            terms = [self._told("made", nodes.Concat(group)) for group in groups]
        return self._told("made", nodes.Concat(terms))

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        cost, is_main = nodes.Const(_size(node)), node is self._main
        node = self.generic_visit(node)
        node.iter = self._told("loop", node.iter, cost)
        if not is_main:
            return node
        # Not where the loop takes them: it takes one ahead to know whether that is the last.
        value = nodes.Name(node.target.name, "load")
        node.body.insert(0, nodes.ExprStmt(self._told("turn", value)))
        return [node, nodes.ExprStmt(self._told("turn", nodes.Const(None)))]


def _size(node: nodes.Node) -> int:
    return sum(1 for _ in node.find_all(nodes.Node))


def _main_loop(tree: nodes.Template) -> nodes.For | None:
    """The loop over the messages, if all before and in it is the same for a part of them.

    That is so if nothing there but the loop itself sees how many messages there are, or any after
    the one at hand, or whether an answer is asked for; and if what follows the loop sees nothing
    but what is the same for all conversations, so that it always writes the same. None where that
    is not plain to see.
    """
    names, mains = {"messages"}, [each for each in tree.body if isinstance(each, nodes.For)]
    odd = (nodes.Block, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Break)
    if len(mains) != 1 or any(True for _ in tree.find_all(odd)):
        return None
    main = mains[0]
    place = tree.body.index(main)
    before, after = tree.body[:place], tree.body[place + 1 :]
    allowed, is_renamed = {id(main.iter)}, False
    for node in _statements(before):
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            value = node.node
            if isinstance(value, nodes.Getitem) and _is_rest(value.arg):
                value = value.node
            if isinstance(value, nodes.Name) and value.name in names:
                names.add(node.target.name)
                allowed |= {id(value), id(node.target)}
                is_renamed = is_renamed or node.target.name == "messages"
    for item in nodes.Template(before).find_all(nodes.Getitem):
        is_first = isinstance(item.arg, nodes.Const) and item.arg.value == 0 and not is_renamed
        if is_first and isinstance(item.node, nodes.Name) and item.node.name == "messages":
            allowed.add(id(item.node))  # a part that is not empty has the first one
    for member in main.find_all(nodes.Getattr):
        is_loop = isinstance(member.node, nodes.Name) and member.node.name == "loop"
        if is_loop and member.attr in ("index", "index0", "first"):
            allowed.add(id(member.node))
    is_plain = isinstance(main.iter, nodes.Name) and main.iter.name in names
    is_plain = is_plain and isinstance(main.target, nodes.Name)
    if not is_plain or main.test is not None or main.else_ or main.recursive:
        return None
    kinds = (nodes.Name, nodes.NSRef)
    seen: list[Any] = list(nodes.Template([*before, main]).find_all(kinds))
    hidden = names | {PROMPT, "loop", "self"}
    if any(name.name in hidden and id(name) not in allowed for name in seen):
        return None
    made = {name.name for name in seen if getattr(name, "ctx", "store") != "load"}
    made |= {macro.name for macro in tree.find_all(nodes.Macro)} | names | {"loop", "self"}
    later: Iterator[Any] = nodes.Template(after).find_all(kinds)
    return None if any(name.name in made for name in later) else main


def _writing_loop(tree: nodes.Template) -> nodes.For | None:
    """The one loop at the top that writes something of messages, whatever else it sees."""
    names, found = {"messages"}, []
    for node in _statements(tree.body):
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            if any(each.name in names for each in node.node.find_all(nodes.Name)):
                names.add(node.target.name)
        elif isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name):
            outputs = [part for each in node.find_all(nodes.Output) for part in each.nodes]
            is_said = any(
                not isinstance(part, nodes.TemplateData) or part.data.strip() for part in outputs
            )
            if is_said and node.iter.name in names and isinstance(node.target, nodes.Name):
                found.append(node)
    return found[0] if len(found) == 1 else None


# Training versions: a template that drops the reasoning of earlier answers, changed so that it
# writes every answer as it does when that is the last thing said.
#
# A version is a change of the template that is at hand, made where its code is the known one; none
# holds a template. What it writes is compared with the template's own text for every row.

QWEN3, NEMOTRON3, DEEPSEEK_R1_DISTILL = "qwen3", "nemotron-3", "deepseek-r1-distill"
# By sha256 of a template: the part of it that goes.
_DEEPSEEK_R1_DISTILL = "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f"
_DROPPING = re.compile(
    r"\{%-? if '</think>' in content %\}\{%-? set content = "
    r"content\.split\('</think>'\)\[-1\] %\}\{%-? endif %\}"
)


def training_version(source: str) -> str | None:
    """The name of the training version that is known of a template."""
    if hashlib.sha256(source.strip().encode()).hexdigest() == _DEEPSEEK_R1_DISTILL:
        return DEEPSEEK_R1_DISTILL
    try:
        tree = Sandbox(None).parse(source)
    except (jinja2.TemplateSyntaxError, RecursionError):
        return None
    if _writing_loop(tree) is None or GENERATION.search(source) is not None:
        return None
    if any(map(_is_later, tree.find_all(nodes.Compare))):
        return QWEN3
    # It writes what the template does; what counts of it is known.
    names = {name.name for name in tree.find_all(nodes.Name)}
    return NEMOTRON3 if "truncate_history_thinking" in names else None


def _is_member(node: object, owner: str | None, name: str) -> bool:
    if not isinstance(node, nodes.Getattr) or node.attr != name:
        return False
    return isinstance(node.node, nodes.Name) and owner in (None, node.node.name)


def _is_later(node: nodes.Compare) -> bool:
    """Whether it asks if an answer comes after the last question."""
    if len(node.ops) != 1 or node.ops[0].op != "gt" or not _is_member(node.expr, "loop", "index0"):
        return False
    return _is_member(node.ops[0].expr, None, "last_query_index")


class _Keeping(NodeTransformer):
    """Has a template of Qwen3's kind write the reasoning of every answer."""

    def visit_Compare(self, node: Any) -> Any:  # noqa: N802
        return nodes.Const(True) if _is_later(node) else self.generic_visit(node)

    def visit_Or(self, node: Any) -> Any:  # noqa: N802
        # `loop.last or (not loop.last and reasoning_content)`
        other = node.right
        if _is_member(node.left, "loop", "last") and isinstance(other, nodes.And):
            left, right = other.left, other.right
            is_not_last = isinstance(left, nodes.Not) and _is_member(left.node, "loop", "last")
            if is_not_last and isinstance(right, nodes.Name) and right.name == "reasoning_content":
                return nodes.Const(True)
        return self.generic_visit(node)


def looks_ahead(source: str) -> bool:
    """Whether a template may write a message in another way once more is said, unmarked."""
    if GENERATION.search(source) is not None:
        return False
    try:
        return _main_loop(Sandbox(None).parse(source)) is None
    except (jinja2.TemplateSyntaxError, RecursionError):
        return False  # it is refused with its own words


def _statements(parts: list[nodes.Node]) -> Iterator[nodes.Node]:
    """Those that are run at the top, in conditions too."""
    for part in parts:
        yield part
        if isinstance(part, nodes.If):
            yield from _statements([*part.body, *part.elif_, *part.else_])


def _is_rest(node: nodes.Node) -> bool:
    """Whether it is a slice such as [1:]."""
    if not isinstance(node, nodes.Slice) or node.stop is not None or node.step is not None:
        return False
    start = node.start.value if isinstance(node.start, nodes.Const) else None
    return type(start) is int and start >= 0


class MessagePlaces(NamedTuple):
    """Where the messages of a conversation begin, and what is written after the last one."""

    # One more than there are messages: the end of the last. None for those before the loop.
    places: list[int | None]
    # Without the header of an answer to come, and with it.
    tails: tuple[str, str]


class ChatTemplate:
    """A compiled template with the strings that it is given besides the conversation."""

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, Any],
        date: datetime.date | None = None,
        version: str | None = None,
    ) -> None:
        """`version` is the name of a training version that is known of it."""
        self.source, self.version = source, version
        self.variables = dict(variables)
        self.has_generation = GENERATION.search(source) is not None
        self.has_prompt = PROMPT in source  # whether it can write the header of an answer alone
        asks = re.search(r"strftime_now\s+is\s+(not\s+)?defined", source)
        if "strftime_now" in source and date is None and not asks:
            raise UsageError(
                "the chat template writes today's date, so the same command would make another "
                "store every day",
                hint="say which day it shall write: --chat-date 2024-07-26",
            )
        if len(source) > MOST_CHARACTERS:
            raise _refused(f"has {len(source):,} characters, more than {MOST_CHARACTERS:,}")
        self._sandbox = Sandbox(date)
        try:
            if version == DEEPSEEK_R1_DISTILL:
                source = _DROPPING.sub("", source)
            tree = self._sandbox.parse(source)
            if version == QWEN3:
                tree = _Keeping().visit(tree)
            # Strings of its expressions: what it writes, and what it looks for.
            constants = [node.value for node in tree.find_all(nodes.Const)]
            self.literals = [each for each in constants if isinstance(each, str)]
            # Every string that the template itself can write, but for its variables.
            texts = [node.data for node in tree.find_all(nodes.TemplateData)]
            self.constants = [*texts, *self.literals]
            macros = tree.find_all((nodes.Macro, nodes.CallBlock))
            self._sandbox.macro_cost = max(map(_size, macros), default=1)
            main = _main_loop(tree)
            # Whether what is written of a message follows from it and those before alone.
            self._is_forward = main is not None
            tree = _Counting(main or _writing_loop(tree)).visit(tree).set_environment(self._sandbox)
            self._template = self._sandbox.from_string(tree)
            # A chain of dicts otherwise, which is copied entry by entry for every conversation.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise _refused(f"is no valid Jinja: {error.message} (line {error.lineno})") from error
        except Exception as error:  # what Jinja and Python say to code that is too large or deep
            what = f"{type(error).__name__}: {error}"[:200]
            raise _refused(f"is nested too deep, or too large ({what})") from error

    def render(
        self, conversation: Conversation, *, prompt: bool = False, tracked: str | None = None
    ) -> str:
        """The conversation's text; `prompt` adds the header of an answer to come."""
        sandbox, seen = self._sandbox, 0
        parts = sandbox.begin(conversation, tracked=tracked)
        values = {
            **self.variables,
            **conversation.variables,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,
            PROMPT: prompt,
        }
        try:
            written = self._template.root_render_func(self._template.new_context(values))
            while True:
                parts.extend(itertools.islice(written, PARTS_AT_ONCE))
                sandbox.make(sum(map(len, parts[seen:] if seen else parts)))
                if len(parts) < seen + PARTS_AT_ONCE:
                    return "".join(parts)
                seen = len(parts)
        except TemplateLimit as error:
            raise RowError(RejectReason.TEMPLATE_ERROR, str(error)) from error
        except RecursionError as error:
            raise RowError(RejectReason.TEMPLATE_ERROR, "the template recurses too deep") from error
        except BuildError:
            raise
        except MemoryError as error:
            # Another machine has more, and would make another store.
            raise BuildError(
                "there is not enough memory to run the chat template on a row",
                hint="use fewer --workers, or a machine with more memory",
            ) from error
        except Exception as error:  # whatever the template's own code can raise
            what = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            # OpenAI's form has nulls beside calls of tools.
            for place, message in enumerate(conversation.messages):
                if message.get("content") is None:
                    what += (
                        f"; message {place} has no content (null), which the template may not "
                        "expect: put an empty string there"
                    )
                    break
            raise RowError(RejectReason.TEMPLATE_ERROR, what) from error

    @property
    def steps(self) -> int:
        """What the last rendering took."""
        return self._sandbox.taken

    def render_tracked(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text with the places of its generation blocks."""
        text = self.render(conversation, tracked=_BLOCKS)
        generated = [(start, start + len(said)) for start, said in self._sandbox.notes if said]
        if not all(text.startswith(said, start) for start, said in self._sandbox.notes):
            raise RowError(
                RejectReason.TEMPLATE_ERROR,
                "a generation block stands inside a macro or a variable, so its place in the text "
                "is not known",
            )
        return text, generated

    def boundaries(self, conversation: Conversation, text: str) -> MessagePlaces | None:
        """Where each message begins in the text of the whole, by one rendering for all of them.

        That is where a rendering up to it would end, but for what is written after all messages.
        None for templates of which that is not known: those that look ahead.
        """
        if not self._is_forward:
            return None
        asked, places = self.render_placed(conversation, prompt=True)
        end = places[-1] if places else None
        if end is None or not text.startswith(asked[:end]):
            return None
        return MessagePlaces(places, (text[end:], asked[end:]))

    def render_placed(
        self, conversation: Conversation, *, prompt: bool = False
    ) -> tuple[str, list[int | None]]:
        """The conversation's text with the place of each message, and the end of the last one.

        No places where the template writes messages in no loop of its own; None for messages before
        that loop.
        """
        text = self.render(conversation, prompt=prompt, tracked=_MESSAGES)
        places, values = [place for place, _ in self._sandbox.notes], self._sandbox.looped[:-1]
        skipped = len(conversation.messages) - len(values)
        # Whatever the loop is over, it must be these very messages, from one of them on.
        rest = conversation.messages[max(skipped, 0) :]
        if not places or skipped < 0 or not all(map(operator.is_, values, rest)):
            return text, []
        return text, [None] * skipped + places

    @functools.cached_property
    def marker(self) -> str:
        """What an answer is known by: the header that the template writes before one is said, as
        far as answers have it. Reasoning is part of what is said."""
        question = Conversation([{"role": "user", "content": "?"}], None)
        try:
            before, asked = (self.render(question, prompt=prompt) for prompt in (False, True))
        except RowError:
            return ""
        if not self.has_prompt:
            header = self.answer_header
        elif asked.startswith(before):
            header = self.answer_header
            header = header[: common_start(asked[len(before) :], header)]
        else:
            header = ""
        return header.partition(_REASONING)[0]

    @functools.cached_property
    def answer_header(self) -> str:
        """What an answer begins with whatever it says; an empty string where that is nothing.

        For templates that have no other way to tell: it is what two answers have in common.
        """
        question = {"role": "user", "content": "?"}
        talks = [[question, {"role": "assistant", "content": one}] for one in _TWO_ANSWERS]
        try:
            before, one, other = (
                self.render(Conversation(talk, None)) for talk in ([question], *talks)
            )
        except RowError:
            return ""
        header = one[len(before) : common_start(one, other)]
        return header if one.startswith(before) and header.strip() else ""


def _refused(why: str) -> TokenizerError:
    return TokenizerError(
        f"the chat template {why}", hint="correct it, or give another one: --chat-template FILE"
    )
