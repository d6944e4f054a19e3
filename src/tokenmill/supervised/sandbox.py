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
"""

from __future__ import annotations

import functools
import json
import re
import time
from typing import TYPE_CHECKING, Any

from tokenmill.errors import BuildError, MissingExtraError
from tokenmill.supervised.rows import nesting

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator

    from tokenmill.supervised.rows import Conversation

SIZES, STEPS, DEPTH = 16 << 20, 16 << 20, 60
"""What a template may make, run and nest for any conversation ..."""
SIZES_PER_CHARACTER, STEPS_PER_CHARACTER = 32, 64
"""... and more of it for each character of this one."""
SECONDS = 600
"""A rendering that takes longer in spite of all limits ends its unit."""
STEPS_AT_ONCE = 1 << 18
"""After so many the clock is looked at."""
MOST_AT_ONCE = 4
"""Values that are put together before it is counted what that makes."""
TRACKED = "tokenmill_tracker"
_ENTRY = 8
"""What an entry of a list counts."""
_WIDEST = 9999
_WIDTHS = {"center", "ljust", "rjust", "zfill"}
_SPLITS = {"split", "rsplit", "splitlines", "partition", "rpartition"}
_UNSAFE = {"encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromkeys"}
"""Methods that no chat needs, and whose results are not easily told in advance."""
_ABSENT = {"forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"}
"""Filters for web pages and debugging, and one that would give another store every time."""
_TAKING = {"default", "d", "first", "last", "attr", "min", "max"}
"""Filters that give what is there already."""
_RULED = {"list", "sort", "unique", "map", "batch", "slice", "center", "indent", "tojson"}
_RULED |= {"replace", "join", "format", "round", "truncate", "sum"}
"""Filters of which it is worked out in advance how much they make."""
_COMPARING = {"in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="}
_COMPARING |= {"gt", ">", "greaterthan", "ge", ">=", "lower", "upper"}
_LOOP = " loop"
"""A filter whose name no expression can have."""


class TemplateLimit(Exception):  # noqa: N818 (Jinja's filters catch errors of most other kinds)
    """A template goes beyond a limit; its text says which."""


def weight(value: object, *, most: int) -> int:
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


def environment(date: datetime.date | None) -> Any:
    """Jinja as transformers sets it up, and its limits."""
    jinja2 = import_jinja()
    made = _sandbox()(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), jinja2.ext.loopcontrols],
    )
    setattr(made, TRACKED, None)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def strftime_now(pattern: str) -> str:
        if len(pattern) > _WIDEST or re.search(r"%[-_0^#+]*[1-9]", pattern):
            raise TemplateLimit("a date is written with a width")
        assert date is not None
        return date.strftime(pattern)

    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["namespace"] = _namespace()
    del made.globals["lipsum"]  # text by chance
    if date is not None:
        made.globals["strftime_now"] = strftime_now
    made.filters = {
        **{name: made.limited(name, f) for name, f in made.filters.items() if name not in _ABSENT},
        # With a context it is not worked out while compiling.
        _LOOP: jinja2.pass_context(lambda _, *said: made.begin_loop(*said)),
    }
    made.tests = {
        name: made.limited_test(test) if name in _COMPARING else test
        for name, test in made.tests.items()
    }
    return made


@functools.cache
def _sandbox() -> Any:
    jinja2 = import_jinja()
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    macro, loop = jinja2.runtime.Macro, jinja2.runtime.LoopContext
    dict_methods, note = frozenset(dir(dict)), _generation_extension()._note

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))
        code_generator_class = _code_generator()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.macro_cost = 1
            """Nodes of the largest macro."""
            self.is_forward = False
            """Whether what is written of a message follows from it and those before alone."""
            self.on_message: Any = None
            """Called before each message, with the rest of them, and behind the last."""
            self.begin(None)

        def begin(self, row: Conversation | None) -> None:
            """Count anew, for the rendering of a row."""
            self._row, self._depth, self._deadline = row, 0, 0.0
            self._sizes = SIZES
            self._steps, self._more_steps = STEPS_AT_ONCE, STEPS - STEPS_AT_ONCE

        def make(self, size: int) -> None:
            """Count what is about to be made."""
            self._sizes -= size
            if self._sizes < 0:
                self._grant()

        def step(self, nodes: int) -> None:
            """Count what is about to be run."""
            self._steps -= nodes
            if self._steps < 0:
                self._look_at_the_clock()
                self._grant()

        def _look_at_the_clock(self) -> None:
            now = time.monotonic()
            self._deadline = self._deadline or now + SECONDS
            if now > self._deadline:
                raise BuildError(
                    f"a chat template took more than {SECONDS} seconds for one row; whether it"
                    " ends at all cannot be known",
                    hint="look for loops within loops in it, or give another one: --chat-template",
                )

        def _grant(self) -> None:
            """Add what is left, and what the row's own size allows: few rows need it."""
            if self._row is not None and (self._sizes < 0 or self._steps + self._more_steps < 0):
                row, self._row = self._row, None
                size = weight([row.messages, row.tools, row.variables], most=1 << 60)
                self._sizes += SIZES_PER_CHARACTER * size
                self._more_steps += STEPS_PER_CHARACTER * size
            if self._sizes < 0:
                raise TemplateLimit(
                    f"the template makes more than {SIZES:,} characters and"
                    f" {SIZES_PER_CHARACTER} for each of the row"
                )
            if self._steps + self._more_steps < 0:
                raise TemplateLimit(
                    f"the template takes more than {STEPS:,} steps and {STEPS_PER_CHARACTER} for"
                    " each character of the row"
                )
            if self._steps < 0:
                taken = min(STEPS_AT_ONCE - self._steps, self._more_steps)
                self._steps += taken
                self._more_steps -= taken

        # What the generated code calls.

        def built(self, value: Any) -> Any:
            """A list or an object that the template has put together, or a part of a value."""
            self.make(weight(value, most=max(self._sizes, 0) or 1 << 60))
            return value

        def part(self, value: Any) -> Any:
            """A slice."""
            self.make(len(value) * (1 if isinstance(value, str) else _ENTRY))
            return value

        def compared(self, value: Any) -> Any:
            """What something is compared with, or looked for in."""
            if isinstance(value, str):
                self.step(len(value) >> 4)
            elif isinstance(value, list | tuple):
                self.step(weight(value, most=1 << 60))
            return value

        def added(self, value: Any) -> Any:
            """What was put together of a few values."""
            if type(value) is str:
                self._sizes -= len(value)
                if self._sizes < 0:
                    self._grant()
                return value
            return self._after(value)

        def joined(self, values: Any) -> str:
            """What stands between tildes, where it is much."""
            texts = list(map(str, values))
            self.make(sum(map(len, texts)))
            return "".join(texts)

        def concat(self, parts: Any) -> str:
            """What a block or a macro wrote."""
            self.make(sum(map(len, parts)))
            return "".join(parts)

        def begin_loop(self, values: Any, cost: int, is_main: bool = False) -> Any:
            """What a loop goes through; where it is that of the messages, each may be noted."""
            if type(cost) is not int or cost < 1:  # the filter map takes names as strings
                raise TemplateLimit("a loop costs something")
            if hasattr(values, "__len__"):
                self.step(len(values) * cost + 1)
                return values if not is_main or self.on_message is None else self._noted(values)
            # The loop itself will say so where it is nothing to go through.
            return _Counted(values, self, cost) if hasattr(values, "__next__") else values

        def _noted(self, values: Any) -> Iterator[Any]:
            for value in values:
                self.on_message(values)
                yield value
            self.on_message(values)

        # What Jinja calls.

        def getattr(self, obj: Any, attribute: str) -> Any:
            # A dict's members come after its attributes; for most names it has none such.
            if type(obj) is dict and attribute in obj and attribute not in dict_methods:
                return obj[attribute]
            return super().getattr(obj, attribute)

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            tree = super()._parse(source, name, filename)
            nodes = jinja2.nodes
            main = _main_loop(tree)
            self.is_forward = main is not None
            for each in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
                cost = sum(1 for _ in each.find_all(nodes.Node))
                if isinstance(each, nodes.For):
                    said = [nodes.Const(cost), nodes.Const(each is main)]
                    each.iter = nodes.Filter(each.iter, _LOOP, said, [], None, None)
                    each.iter.set_environment(self)
                else:
                    self.macro_cost = max(self.macro_cost, cost)
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                if type(left) is str and type(right) is str:
                    self.make(len(left) + len(right))
                    return left + right
                if isinstance(left, str) and isinstance(right, str):
                    self.make(len(left) + len(right))
                elif isinstance(left, list | tuple):
                    self.built((left, right))
            elif operator == "*":
                times, what = (left, right) if isinstance(left, int) else (right, left)
                if isinstance(what, str | list | tuple) and isinstance(times, int):
                    self.make(max(times, 0) * weight(what, most=1 << 60))
                elif isinstance(what, int) and isinstance(times, int):
                    self._check_digits(what.bit_length() + times.bit_length())
            elif operator == "**":
                if isinstance(left, int) and isinstance(right, int):
                    self._check_digits(left.bit_length() * abs(right))
            elif isinstance(left, str):
                self._check_format(left, "%", right)
            return super().call_binop(context, operator, left, right)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            @functools.wraps(value)
            def limited(*args: Any, **kwargs: Any) -> Any:
                self._check_format(value.__self__, "{", (args, kwargs))
                return wrapped(*args, **kwargs)

            return limited

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            if __self._depth >= DEPTH:
                raise TemplateLimit(f"the template recurses more than {DEPTH} deep")
            kind = type(__obj)
            __self._depth += 1
            if kind is macro or getattr(__obj, "__func__", None) is note:
                # The template's own: as safe as the template, and what it makes was counted.
                __self.step(__self.macro_cost)
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                made = __obj(*args, **kwargs)
                __self._depth -= 1
                return made
            __self.step(4)
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                args = __self._before_method(owner, __obj.__name__, args, kwargs)
            elif kind is loop:
                args = (__self.begin_loop(args[0], __self.macro_cost), *args[1:])
            made = super().call(__context, __obj, *args, **kwargs)
            __self._depth -= 1
            # What an object holds was there before.
            return made if isinstance(owner, dict) else __self._after(made)

        def limited(self, name: str, function: Any) -> Any:
            """A filter that counts."""
            own = int(hasattr(function, "jinja_pass_arg"))
            has_rule = name in _RULED

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                value = args[own]
                if isinstance(value, str | list | tuple | dict):
                    self.step(len(value) >> 4)
                if has_rule:
                    args = (*args[:own], *self._before_filter(name, args[own:], kwargs))
                made = function(*args, **kwargs)
                if name in _TAKING:
                    return made
                if hasattr(made, "__next__"):
                    # What comes one by one may come from what comes one by one, and so on.
                    return _Counted(made, self, 1, nested=getattr(value, "nested", 0))
                return self._after(made)

            return limited

        def limited_test(self, function: Any) -> Any:
            """A test that counts."""

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                for value in args:
                    self.compared(value)
                return function(*args, **kwargs)

            return limited

        # How much there will be.

        def _before_method(
            self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, ...]:
            self.step(len(text) >> 4)
            if name in _SPLITS:
                self.make(4 * len(text))
            elif name in _WIDTHS:
                self._make_wide(text, args, kwargs, often=1)
            elif name == "expandtabs":
                self._make_wide(text, args or (8,), kwargs, often=text.count("\t"))
            elif name == "replace":
                self._make_replaced(text, *args[:2])
            elif name == "join" and args:
                return (self._make_joined(text, args[0]), *args[1:])
            return args

        def _before_filter(
            self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, ...]:
            value, rest = args[0], args[1:]
            if name in ("list", "sort", "unique", "map", "batch", "slice") and hasattr(
                value, "__len__"
            ):
                self.make(_ENTRY * len(value))
            if name in ("center", "batch", "slice"):
                self._make_wide("", rest, kwargs, often=_ENTRY)
            elif name == "indent":
                if not isinstance(value, str):  # Jinja would add a line to a list, in its place
                    raise TemplateLimit("the filter indent is for texts")
                self._make_wide("", rest or (4,), kwargs, often=value.count("\n") + 2)
            elif name == "tojson":
                size = weight(value, most=1 << 60)
                width = sum(_width(each) for each in (*rest, *kwargs.values()))
                self.make(size + size // _ENTRY * width * (nesting(value) if width else 0))
            elif name == "replace":
                old, new = (*rest, kwargs.get("old"), kwargs.get("new"))[:2]
                self._make_replaced(str(value), old, new)
            elif name == "join":
                between = rest[0] if rest else kwargs.get("d", "")
                return (self._make_joined(str(between), value), *rest)
            elif name == "format":
                self._check_format(str(value), "%", (rest, kwargs))
            elif name in ("round", "truncate"):
                self._make_wide("", rest, kwargs, often=1)
                if name == "round":
                    self._check_digits(4 * max(map(_width, (0, *rest, *kwargs.values()))))
            elif name == "sum" and not all(
                isinstance(each, int | float | str | None) for each in (*rest, *kwargs.values())
            ):
                raise TemplateLimit("the filter sum adds up numbers alone")
            return args

        def _after(self, made: Any) -> Any:
            if isinstance(made, str):
                self.make(len(made))
            elif isinstance(made, list | tuple | dict):
                self.built(made)
            return made

        def _make_wide(
            self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, often: int
        ) -> None:
            widest = max(map(_width, (0, *args, *kwargs.values())))
            if widest > SIZES:
                raise TemplateLimit(f"the template makes something {widest:,} wide")
            self.make(len(text) + widest * often)

        def _make_replaced(self, text: str, old: Any = None, new: Any = None) -> None:
            more = len(str(new)) - len(str(old))
            self.make(len(text) + max(more, 0) * text.count(str(old)))

        def _make_joined(self, between: str, values: Any) -> Any:
            if not isinstance(values, list | tuple | dict | str):
                values = list(values)
            self.make(weight(values, most=1 << 60) + len(between) * len(values))
            return values

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
            one = weight(values, most=1 << 60) + (_WIDEST if widths else 0)
            self.make(len(text) + len(fields) * one)

    return Sandbox


def _width(value: object) -> int:
    """How much wider a number, or a text or two that stand in its place, can make something."""
    if isinstance(value, tuple):
        return sum(map(_width, value))
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


class _Counted:
    """Values that a filter gives one by one, each of which is a step."""

    def __init__(self, values: Iterator[Any], sandbox: Any, cost: int, *, nested: int = 0) -> None:
        self._values, self._sandbox, self._cost = values, sandbox, cost
        self.nested = nested + 1
        if self.nested > DEPTH:
            raise TemplateLimit(f"the template nests filters more than {DEPTH} deep")

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self._sandbox.step(self._cost)
        return next(self._values)


@functools.cache
def _code_generator() -> Any:
    """Jinja's compiler, with calls of the sandbox where values are made without it."""
    jinja2 = import_jinja()
    from jinja2.compiler import CodeGenerator, operators, optimizeconst

    nodes = jinja2.nodes

    class Generator(CodeGenerator):
        def _within(self, name: str, visit: Any, node: Any, frame: Any) -> None:
            self.write(f"environment.{name}(")
            visit(node, frame)
            self.write(")")

        def visit_List(self, node: Any, frame: Any) -> None:  # noqa: N802
            self._within("built", super().visit_List, node, frame)

        def visit_Dict(self, node: Any, frame: Any) -> None:  # noqa: N802
            self._within("built", super().visit_Dict, node, frame)

        def visit_Tuple(self, node: Any, frame: Any) -> None:  # noqa: N802
            if node.ctx == "load":
                self._within("built", super().visit_Tuple, node, frame)
            else:
                super().visit_Tuple(node, frame)

        def visit_Getitem(self, node: Any, frame: Any) -> None:  # noqa: N802
            if isinstance(node.arg, nodes.Slice):
                self._within("part", super().visit_Getitem, node, frame)
            else:
                super().visit_Getitem(node, frame)

        def visit_Operand(self, node: Any, frame: Any) -> None:  # noqa: N802
            if isinstance(node.expr, nodes.Const):
                super().visit_Operand(node, frame)
            else:
                self.write(f" {operators[node.op]} ")
                self._within("compared", self.visit, node.expr, frame)

        @optimizeconst
        def visit_Add(self, node: Any, frame: Any) -> None:  # noqa: N802
            terms = _terms(node)
            if _unknown(terms) > MOST_AT_ONCE:
                super().visit_Add(node, frame)
                return
            self.write("environment.added((")
            for number, each in enumerate(terms):
                self.write(" + " if number else "")
                self.visit(each, frame)
            self.write("))")

        @optimizeconst
        def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802
            if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
                self.fail("a chat template has no autoescape", node.lineno)
            is_short = _unknown(node.nodes) <= MOST_AT_ONCE
            self.write("environment.added(str_join((" if is_short else "environment.joined((")
            for each in node.nodes:
                self.visit(each, frame)
                self.write(", ")
            self.write(")))" if is_short else "))")

    def _terms(node: Any) -> list[Any]:
        """The terms of a sum, from left to right."""
        terms: list[Any] = []
        while isinstance(node, nodes.Add):
            terms.append(node.right)
            node = node.left
        return [node, *reversed(terms)]

    def _unknown(terms: list[Any]) -> int:
        return sum(not isinstance(each, nodes.Const) for each in terms)

    return Generator


def _main_loop(tree: Any) -> Any:
    """The loop over the messages, if all before and in it is the same for a part of them.

    That is so if nothing there but the loop itself sees how many messages there are, or any behind
    the one at hand, or whether an answer is asked for; and if what stands behind the loop sees
    nothing but what is the same for all conversations, so that it always writes the same. None
    where that is not plain to see.
    """
    nodes = import_jinja().nodes
    names, mains = {"messages"}, [n for n in tree.body if isinstance(n, nodes.For)]
    odd = (nodes.Block, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Break)
    if len(mains) != 1 or any(True for _ in tree.find_all(odd)):
        return None
    main = mains[0]
    place = tree.body.index(main)
    allowed, is_renamed = {id(main.iter)}, False
    for node in _statements(tree.body[:place]):
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            value = node.node
            if isinstance(value, nodes.Getitem) and _is_rest(value.arg):
                value = value.node
            if isinstance(value, nodes.Name) and value.name in names:
                names.add(node.target.name)
                allowed |= {id(value), id(node.target)}
                is_renamed = is_renamed or node.target.name == "messages"
    for each in (one for node in tree.body[:place] for one in node.find_all(nodes.Getitem)):
        is_first = isinstance(each.arg, nodes.Const) and each.arg.value == 0 and not is_renamed
        if is_first and isinstance(each.node, nodes.Name) and each.node.name == "messages":
            allowed.add(id(each.node))  # a part that is not empty has the first one
    for each in main.find_all(nodes.Getattr):
        is_loop = isinstance(each.node, nodes.Name) and each.node.name == "loop"
        if is_loop and each.attr in ("index", "index0", "first"):
            allowed.add(id(each.node))
    is_plain = isinstance(main.iter, nodes.Name) and main.iter.name in names
    if not is_plain or main.test is not None or main.else_ or main.recursive:
        return None
    before = [*_names(tree.body[:place]), *_names([main])]
    for name in before:
        hidden = name.name in names or name.name in ("add_generation_prompt", "loop", "self")
        if hidden and id(name) not in allowed:
            return None
    made = {name.name for name in before if getattr(name, "ctx", "store") != "load"}
    made |= {macro.name for macro in tree.find_all(nodes.Macro)}
    behind = {name.name for name in _names(tree.body[place + 1 :])}
    return None if behind & (made | names | {"loop", "self"}) else main


def _statements(parts: list[Any]) -> Iterator[Any]:
    """Those that are run at the top, in conditions too."""
    for part in parts:
        yield part
        if isinstance(part, import_jinja().nodes.If):
            yield from _statements([*part.body, *part.elif_, *part.else_])


def _is_rest(node: Any) -> bool:
    """Whether it is a slice such as [1:]."""
    nodes = import_jinja().nodes
    if not isinstance(node, nodes.Slice) or node.stop is not None or node.step is not None:
        return False
    return (
        isinstance(node.start, nodes.Const)
        and type(node.start.value) is int
        and (node.start.value >= 0)
    )


def _names(parts: list[Any]) -> Iterator[Any]:
    nodes = import_jinja().nodes
    for part in parts:
        if isinstance(part, nodes.Name):
            yield part
        yield from part.find_all((nodes.Name, nodes.NSRef))


@functools.cache
def _namespace() -> Any:
    class Namespace(import_jinja().runtime.Namespace):  # type: ignore[misc]
        def __repr__(self) -> str:
            # Two that hold each other twice would be a text without end.
            raise TemplateLimit("a namespace is no text")

    return Namespace


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


@functools.cache
def _generation_extension() -> Any:
    """The tag that encloses what an assistant says, as transformers defines it."""
    jinja2 = import_jinja()
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_note")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _note(self, caller: Any) -> Any:
            said = caller()
            tracker = getattr(self.environment, TRACKED)
            if tracker is not None:
                tracker.note(str(said))
            return said

    return GenerationBlocks


def import_jinja() -> Any:
    """Jinja, which only chats need."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.runtime
    except ImportError as error:
        raise MissingExtraError(
            "jinja2", extra="chat", purpose="rendering chats with a chat template"
        ) from error
    return jinja2
