"""What `mkdocs build` does beside making pages of docs/: the hooks, and signatures of the code.

    README, examples and other files that pages link to    become pages (links work in both places)
    functions that take a class of options                 are shown with the options
    the pages that were built                              ask for nothing of elsewhere, or it fails

The one thing to know: a link is written for the repository, relative to the page it is in. Here it
is turned into one that holds on the site, where docs/ is the root.
"""

from __future__ import annotations

import ast
import html.parser
import json
import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]*`)|\]\((?P<to>[^)\s]+)\)", re.MULTILINE | re.DOTALL
)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
NOTEBOOK = ".ipynb"
SHOWN = (".md", NOTEBOOK, *LANGUAGES)  # in the list of a folder
HEAD = "README.md"  # is the first page
LOADING = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}

KINDS = [
    griffe.ParameterKind.positional_or_keyword,
    griffe.ParameterKind.keyword_only,
    griffe.ParameterKind.var_keyword,
]

_pages: dict[str, str] = {}  # of what is not in docs/: page -> file or folder of the repository


def on_config(config):
    """Headings get the anchors that they have in the repository; decisions are all listed."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    decisions = next(each["Decisions"] for each in config.nav if "Decisions" in each)
    decisions += sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md"))
    return config


def on_files(files, *, config):
    """Add what pages link to and docs/ does not have, and what those link to."""
    _pages.clear()
    waiting = [f"docs/{file.src_uri}" for file in files if file.is_documentation_page()]
    waiting.append(HEAD)
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        page = page_of(source)
        if files.get_file_from_path(page) is None:
            _pages[page] = source
            files.append(File.generated(config, page, content=text_of(source)))
        for target in linked(source, text_of(source)) - seen:
            if (ROOT / target).exists() and not target.endswith((".png", ".css")):
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown, *, page, config, files):  # noqa: ARG001
    """Links of the repository become those of the site."""
    here = page.file.src_uri
    source = _pages.get(here, f"docs/{here}")

    def on_site(found):
        to, _, anchor = (found["to"] or "").partition("#")
        if not to or ":" in to:
            return found[0]
        target = posixpath.normpath(posixpath.join(folder_of(source), to))
        way = posixpath.relpath(page_of(target), posixpath.dirname(here) or ".")
        return f"]({way}{'#' if anchor else ''}{anchor})"

    return LINK.sub(on_site, markdown)


def on_post_build(*, config):
    """PluginError for a page that would load what is not on the site."""
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*.html")):
        asked = Loaded(path.read_text())
        if outside := [url for url in asked.urls if re.match(r"(?:https?:)?//", url)]:
            raise PluginError(f"{path.relative_to(site)} would load {', '.join(outside)}")
    for path in sorted(site.rglob("*.css")):
        if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()):
            raise PluginError(f"{path.relative_to(site)} would load what is not on the site")


class Loaded(html.parser.HTMLParser):
    """The addresses that a page makes a browser ask for."""

    def __init__(self, text):
        super().__init__()
        self.urls = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in LOADING and given.get("rel") not in ("canonical", "next", "prev"):
            self.urls.append(given.get(LOADING[tag]) or "")


def page_of(source):
    """Where a file or a folder of the repository is on the site."""
    if source == HEAD:
        return "index.md"
    if (ROOT / source).is_dir():
        return posixpath.join(source, "index.md").removeprefix("docs/")
    if source.endswith(".md") and "/" not in source:
        return f"project/{source}"  # beside docs/security.md there is a SECURITY.md
    kept = source.startswith("docs/") or source.endswith(".md")
    return source.removeprefix("docs/") if kept else f"{source}.md"


def folder_of(source):
    return source if (ROOT / source).is_dir() else posixpath.dirname(source)


def text_of(source):
    """A page of a file: itself, its code, or what is in a folder."""
    path = ROOT / source
    if path.is_dir():
        return listing(source)
    text = path.read_text()
    if path.suffix == NOTEBOOK:
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"])
        parts = (f"```python\n{said}\n```" if kind == "code" else said for kind, said in cells)
        return "\n\n".join(parts) + "\n"
    if path.suffix == ".md":
        return text
    return f"# {source}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text}```\n"


def listing(folder):
    """A page with a line for each file of a folder."""
    paths = [p for p in sorted((ROOT / folder).iterdir()) if p.suffix in SHOWN]
    lines = [f"- [{title_of(path)}]({path.name})" for path in paths]
    return "\n".join([f"# {Path(folder).name.capitalize()}\n", *lines])


def title_of(path):
    """What a file says it is: its heading, or its name and its first sentence."""
    source = path.relative_to(ROOT).as_posix()
    text = text_of(source) if path.suffix == NOTEBOOK else path.read_text()
    first = next(line for line in text.splitlines() if not line.startswith("#!"))
    words = first.strip('"# ').rstrip(".,:")
    return words if path.suffix == ".md" else f"`{path.name}`: {words}"


def linked(source, text):
    """What a page of the repository links to, by its path there."""
    found = [each["to"].partition("#")[0] for each in LINK.finditer(text) if not each["code"]]
    base = folder_of(source)
    ways = [posixpath.normpath(posixpath.join(base, to)) for to in found if to and ":" not in to]
    return {way for way in ways if not way.startswith("..")}


class Options(griffe.Extension):
    """`build(options: BuildOptions)` is called with the options themselves: so it is shown."""

    def on_package(self, *, pkg, **_):
        for module in modules(pkg):
            own = (each for each in module.functions.values() if not each.is_alias)
            for function in own:
                for decorator in function.decorators:
                    name, _, given = str(decorator.value).partition("(")
                    if name in ("with_options", "with_settings"):
                        kind = module[given.rstrip(")")]
                        show(function, kind, extra="settings" if name == "with_settings" else "")


def modules(module):
    yield module
    for each in module.modules.values():
        if not each.is_alias:
            yield from modules(each)


def show(function, kind, *, extra):
    """Give a function the fields of a class as its parameters, and a list of what they are for."""
    parameters, told = [], []
    for field in fields_of(kind):
        default, words = said_of(field)
        way = griffe.ParameterKind.keyword_only
        if field.name == extra:
            way, default = griffe.ParameterKind.var_keyword, None
        elif "kw_only=False" in str(field.value):
            way = griffe.ParameterKind.positional_or_keyword
        given = {"annotation": field.annotation, "default": default}
        parameters.append(griffe.Parameter(field.name, kind=way, **given))
        if words:
            about = {"description": words, "annotation": field.annotation, "value": default}
            told.append(griffe.DocstringParameter(field.name, **about))
    # What has to be given comes first.
    parameters.sort(key=lambda each: (KINDS.index(each.kind), each.default is not None))
    told.sort(key=lambda each: each.value is not None)
    function.parameters = griffe.Parameters(*parameters)
    if told and function.docstring:
        function.docstring.parsed.append(griffe.DocstringSectionParameters(told))


def fields_of(kind):
    """The fields of a dataclass, those of its bases first."""
    classes = [*reversed(kind.mro()), kind]
    found = {each.name: each for kind in classes for each in kind.attributes.values()}
    return [
        each
        for each in found.values()
        if each.annotation
        and "property" not in each.labels
        and "ClassVar" not in str(each.annotation)
    ]


def said_of(field):
    """The default of a field and what it is for, as options.py's `option` and `same` say it."""
    words = " ".join(field.docstring.value.split()) if field.docstring else ""
    value = field.value
    if not isinstance(value, griffe.ExprCall):
        return (None if value is None else str(value)), words
    called = str(value.function)
    if called == "same":
        kind, name = (
            field.parent.module[str(value.arguments[0])],
            ast.literal_eval(str(value.arguments[1])),
        )
        default, there = said_of(next(each for each in fields_of(kind) if each.name == name))
        return default, words or there
    if called == "option":
        default = str(value.arguments[0])
        return (None if default == "MISSING" else default), words
    for each in value.arguments:
        if isinstance(each, griffe.ExprKeyword) and each.name == "default":
            return str(each.value), words
    return ("..." if "default_factory" in str(value) else None), words
