"""From what the user names to files with a format: by suffix, or by a look inside.

A file that the user names must be usable, or it is an error. A file that merely is in a folder is
left out if it is not text, or is text that comes with data and is none, and reported as skipped. No
file counts twice, whatever its names. Which split a file is of follows from its path alone; whether
that is used is part of what a store is.
"""

from __future__ import annotations

import codecs
import difflib
import itertools
import json
import operator
import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from tokenmill import files as files_module
from tokenmill.errors import SourceError
from tokenmill.files import FileStat, FoundFile, PathInput, shown
from tokenmill.sources import base
from tokenmill.sources.base import COMPRESSIONS, FORMATS, SourceFile, SourceOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


# -------------------------------------------------------------------------------------------------
# Well-known corpora by their short names: the files of the training split on the hub.
#
# A file or folder of that name in the working folder wins: what a command reads must not change
# when a name is added here.


class KnownCorpus(NamedTuple):
    files: str
    holds: str


# All have their text in the field `text`.
CORPORA = {
    "fineweb-edu": KnownCorpus(
        "hf://datasets/HuggingFaceFW/fineweb-edu/data/*/*.parquet",
        "web pages of educational value; smaller samples are under sample/10BT, 100BT, 350BT",
    ),
    "slimpajama": KnownCorpus(
        "hf://datasets/cerebras/SlimPajama-627B/train/*/*.jsonl.zst",
        "web, code, books, papers and more, deduplicated; 59,166 files with the other splits",
    ),
    "wikitext-103": KnownCorpus(
        "hf://datasets/Salesforce/wikitext/wikitext-103-raw-v1/train-*.parquet",
        "Wikipedia articles, cut into lines: a row is one line, and many are empty",
    ),
    "openwebtext": KnownCorpus(
        "hf://datasets/Skylion007/openwebtext/plain_text/train-*.parquet",
        "web pages that were linked to on Reddit",
    ),
    "c4": KnownCorpus(
        "hf://datasets/allenai/c4/en/c4-train.*.json.gz",
        "cleaned English pages of Common Crawl; other variants are beside en/",
    ),
}


def corpus_files(name: PathInput) -> PathInput:
    """The files that an input means if it is the name of a corpus; else the input.

    Names differ by hyphens and capitals, and people know the hub's own ones too.
    """
    if not isinstance(name, str) or os.path.exists(name):  # noqa: PTH110 - also of a whole text
        return name
    for short, corpus in CORPORA.items():
        owner, repository = corpus.files.split("/")[3:5]
        if _plain(name) in map(_plain, (short, repository, f"{owner}/{repository}")):
            return corpus.files
    if close := difflib.get_close_matches(_plain(name), map(_plain, CORPORA), 1):
        short = next(each for each in CORPORA if _plain(each) == close[0])
        raise SourceError(
            f"input {shown(name)!r} matches no file",
            hint=f"if the corpus {short!r} is meant: {CORPORA[short].files!r}",
        )
    return name


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name.casefold())


# -------------------------------------------------------------------------------------------------
# Small files, put into groups that become one unit: text files that are one document each, and
# files of any format where there are many.
#
# Groups are of neighbours in the order of paths. Where a group ends depends on the name of its last
# file, and on its size, so a new file changes the group it falls into and few after it. A group is
# called after the file before it: that name stays when files join the group, first or last.

# No path that was normalised contains "//" after a name without a scheme.
GROUP = "group//"
# Older stores have groups of text files alone, whose names, and not their files, say their order.
GROUP_OF_TEXTS = "text//"
_FILES_PER_GROUP = 256
_FILES_PER_END = 16  # once a group is large enough
# So many files that are smaller than this part of a unit, and no fewer, are put into groups.
MANY_FILES = 64
SMALL_FILES_PER_UNIT = 4


def group_files(files: Sequence[SourceFile], options: SourceOptions) -> Iterator[SourceFile]:
    """The files, sorted by path and of one split, with groups in the place of small ones."""
    limit = options.unit_bytes or options.least_unit_bytes
    most = limit // SMALL_FILES_PER_UNIT
    others = (file for file in files if not base.is_document(file, options))
    has_many = sum(base.text_size(file) < most for file in others) >= MANY_FILES
    kind = GROUP if options.in_order else GROUP_OF_TEXTS
    if files and files[0].split is not None:
        kind += f"{files[0].split}/"
    name = f"{kind}first"
    held: list[SourceFile] = []
    held_bytes = 0
    for file in files:
        size, is_text = base.text_size(file), base.is_document(file, options)
        is_alone = size >= limit if is_text else not has_many or size >= most
        if is_alone and held:
            yield make_group(name, held)
            name, held, held_bytes = f"{kind}after/{held[-1].path}", [], 0
        if is_alone and not is_text:
            yield file
            name = f"{kind}after/{file.path}"
            continue
        held.append(file)
        held_bytes += size
        key = xxhash.xxh3_64_intdigest(file.path.encode(errors="surrogateescape"))
        may_end = options.in_order and 2 * held_bytes >= limit and key % _FILES_PER_END == 0
        if held_bytes >= limit or may_end or key % _FILES_PER_GROUP == 0:
            yield make_group(name, held)
            name, held, held_bytes = f"{kind}after/{file.path}", [], 0
    if held:
        yield make_group(name, held)


def make_group(path: str, members: Sequence[SourceFile]) -> SourceFile:
    """One source file that stands for its members."""
    facts = "".join(f"{member.path}\0{member.size}\0{member.version}\0" for member in members)
    return SourceFile(
        path=path,
        format="group",
        compression=None,
        size=sum(member.size for member in members),
        version=xxhash.xxh3_128_hexdigest(facts.encode(errors="surrogateescape")),
        members=tuple(members),
        split=members[0].split,
        changed=max(member.changed for member in members),
    )


# What a suffix promises. Files with other ones are text if they look like it.
_BY_SUFFIX = {
    suffix: name
    for name, form in FORMATS.items()
    for suffix in (*form.suffixes, *form.more_suffixes)
}
_DATASET_INDEX = "state.json"
_DATASET_FILES = frozenset({"dataset_info.json", "dataset_dict.json", _DATASET_INDEX})
_DATASET_INFOS = "dataset_infos.json"
_DESCRIPTION = "describes a dataset"
_SNIFF_BYTES = 1 << 14
_KNOWN = (
    f"{' '.join(suffix for form in FORMATS.values() for suffix in form.suffixes)}, "
    f"and {' '.join(COMPRESSIONS)} after them"
)


class Skipped(NamedTuple):
    """A file that is in an input folder and is not read."""

    path: str
    reason: str


class Stray(NamedTuple):
    """A file that an older build read, and a newer one does not."""

    file: SourceFile
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """What the inputs stand for."""

    files: tuple[SourceFile, ...]  # sorted by path; groups stand for their members
    skipped: tuple[Skipped, ...]
    least_unit_bytes: int  # follows from the size of all files
    strays: tuple[Stray, ...] = ()
    splits: Mapping[str, str] = field(default_factory=dict)  # path -> what its name tells

    @property
    def told(self) -> set[str | None]:
        """The splits that the names of all files tell; None among them where one tells none."""
        members = (each for file in self.files for each in file.members or (file,))
        return {self.splits.get(each.path) for each in members}

    @property
    def not_read(self) -> tuple[Skipped, ...]:
        """All that was passed over."""
        return (*(Skipped(each.file.path, each.reason) for each in self.strays), *self.skipped)

    def grouped(self, options: SourceOptions) -> Discovery:
        """The same files, in groups and splits as these options make them."""
        found = [each for file in self.files for each in file.members or (file,)]
        strays = self.strays
        if options.reads_strays:
            found, strays = [*found, *(each.file for each in strays)], ()
        found.sort(key=_path)
        splits = self.splits if options.by_name else {}
        found = [replace(file, split=splits.get(file.path)) for file in found]
        if options.in_order:
            of_splits = sorted({file.split or "" for file in found})
            grouped = (
                group_files([file for file in found if (file.split or "") == split], options)
                for split in of_splits
            )
            found = sorted(itertools.chain.from_iterable(grouped), key=_first_path)
        else:  # an older store
            texts = [file for file in found if base.is_document(file, options)]
            others = [file for file in found if not base.is_document(file, options)]
            found = sorted([*others, *group_files(texts, options)], key=_path)
        least = options.least_unit_bytes
        return replace(self, files=tuple(found), strays=strays, least_unit_bytes=least)

    def text_bytes(self, options: SourceOptions) -> int:
        """Bytes of text in all files that these options read."""
        strays = (each.file for each in self.strays) if options.reads_strays else ()
        return sum(map(base.text_size, (*self.files, *strays)))


def discover(
    inputs: Sequence[PathInput],
    options: SourceOptions,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Discovery:
    """Find the files of the inputs, those alone that the globs leave."""
    found: list[SourceFile] = []
    skipped: list[Skipped] = []
    strays: list[Stray] = []
    looked_at: set[tuple[str, str | None, str | None]] = set()
    matched, places = _matches(inputs)
    wanted, left_out = _choose(matched, places, include=include, exclude=exclude)
    named: set[str] = set()
    for match, facts in _unique(wanted):
        result = _examine(match, facts, looked_at)
        if isinstance(result, SourceFile):
            found.append(result)
            if match.named:
                named.add(result.path)
        elif isinstance(result, Stray):
            strays.append(result)
        else:
            skipped.append(result)
    # Units are named after paths, which do not hold what is after the `?` of an address.
    for twin, count in Counter(map(_path, found)).most_common(1):
        if count > 1:
            raise SourceError(
                f"two inputs are {twin!r} but for what is after its '?', which may be a key and so "
                "is no part of a file's name",
                hint="build them one by one, or from copies that have names of their own",
            )
    found = list(_without_caches(found, skipped))
    found = list(_without_strays(found, named, strays))
    skipped += left_out
    if not found:
        passed = [*(Skipped(each.file.path, each.reason) for each in strays), *skipped]
        examples = "; ".join(f"{skip.path}: {skip.reason}" for skip in passed[:3]) or "none"
        given = ", ".join(repr(shown(str(each))) for each in inputs)
        raise SourceError(
            f"no usable text in {given or 'an empty list of inputs'}; files passed over: "
            f"{examples}",
            hint="change --include and --exclude: they are for the names of files, and with a '/' "
            "for paths below the input"
            if left_out
            else f"name files with one of these endings: {_KNOWN}",
        )
    least = base.least_unit_bytes(sum(map(base.text_size, found)))
    discovery = Discovery(
        files=tuple(found),
        skipped=tuple(skipped),
        least_unit_bytes=least,
        strays=tuple(strays),
        splits=_splits(found, places, options),
    )
    return discovery.grouped(replace(options, least_unit_bytes=least))


# -------------------------------------------------------------------------------------------------
# What is chosen among the files by globs.


def _matches(inputs: Sequence[PathInput]) -> tuple[list[FoundFile], dict[str, str]]:
    """The files that the inputs stand for, and the folder of the input that has each of them."""
    matched: list[FoundFile] = []
    places: dict[str, str] = {}
    for each in inputs:
        root = files_module.normalise(each)
        for match in files_module.matches(each):
            matched.append(match)
            folder = root if match.path.startswith(f"{root}/") else match.path.rpartition("/")[0]
            if folder != root and match.path != root:
                folder = files_module.fixed_part(root)
            path = shown(match.path) if files_module.is_remote(match.path) else match.path
            places.setdefault(path, shown(folder))
    return matched, places


def _choose(
    matched: list[FoundFile],
    places: Mapping[str, str],
    *,
    include: Sequence[str],
    exclude: Sequence[str],
) -> tuple[list[FoundFile], list[Skipped]]:
    """The files that the globs leave, and those that they do not."""
    if not include and not exclude:
        return matched, []
    rules = [
        [(pattern, _glob_of(pattern)) for pattern in patterns] for patterns in (include, exclude)
    ]
    chosen: list[FoundFile] = []
    left_out: dict[str, Skipped] = {}
    for match in matched:
        path = shown(match.path) if files_module.is_remote(match.path) else match.path
        below = path.removeprefix(f"{places[path]}/")
        name = path.rpartition("/")[2]
        wanted, unwanted = (
            next(
                (
                    pattern
                    for pattern, rule in each
                    if any(map(rule.fullmatch, (below, path) if "/" in pattern else (name,)))
                ),
                None,
            )
            for each in rules
        )
        if unwanted is not None:
            left_out[path] = Skipped(path, f"left out by --exclude {unwanted!r}")
        elif include and wanted is None:
            left_out[path] = Skipped(path, "not among what --include names")
        else:
            chosen.append(match)
    return chosen, [left_out[path] for path in sorted(left_out)]


def _glob_of(pattern: str) -> re.Pattern[str]:
    return files_module.glob_rule(f"{pattern}**" if pattern.endswith("/") else pattern)


# -------------------------------------------------------------------------------------------------
# Splits by name, as `datasets` knows them: a word that stands by itself in the name of a file or of
# a folder. Of several, the first of the path counts.
#
# Folders above an input have names for other reasons, and so do files that are a document each:
# those tell a split only where a folder or file is for training, so that there is more than one.

TRAIN, VAL, TEST = "train", "val", "test"
_SPLIT_WORDS = {
    TRAIN: ("train", "training"),
    VAL: ("validation", "valid", "dev", "val"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _SPLIT_WORDS.items() for word in words}
_SPLIT_WORD = re.compile(
    rf"(?:^|[-._ 0-9])({'|'.join(sorted(_SPLIT_OF, key=len, reverse=True))})(?=$|[-._ 0-9])",
    re.IGNORECASE,
)


def split_told(parts: Iterable[str]) -> str | None:
    """The split that the first of these names tells that tells any."""
    found = next(filter(None, map(_SPLIT_WORD.search, parts)), None)
    return None if found is None else _SPLIT_OF[found[1].lower()]


def _splits(
    files: Sequence[SourceFile], places: Mapping[str, str], options: SourceOptions
) -> dict[str, str]:
    """The split of each file whose path tells one."""
    folders = {places[file.path] for file in files}
    shared = _shared_folder([folder.split("/") for folder in folders])
    within: dict[str, str | None] = {}
    anywhere: dict[str, str | None] = {}
    for file in files:
        path, place = file.path, places[file.path]
        *inner, name = path[len(place) + 1 if place else 0 :].split("/")
        outer = place.split("/")[shared:] if place else []
        own = [] if base.is_document(file, options) else [name]
        within[path] = None if base.is_document(file, options) else split_told([*inner, *own])
        anywhere[path] = split_told([*outer, *inner, *own])
    told = anywhere if TRAIN in anywhere.values() else within
    return {path: split for path, split in told.items() if split is not None}


def _shared_folder(folders: list[list[str]]) -> int:
    """How many names all of the folders begin with."""
    count = 0
    for names in zip(*folders, strict=False):
        if len(set(names)) > 1:
            break
        count += 1
    return count


# -------------------------------------------------------------------------------------------------
# Text that comes with data and is none: what describes a dataset, and the code that made it.
#
# In a folder with data files, text other than .txt is about them; so are files with the names that
# repositories have, and scripts, in a folder above. Named by itself, such a file is read.

_ABOUT = re.compile(
    r"\..*|(readme|licen[cs]e|copying|notice|citation|changelog|authors|contributing|requirements"
    r"|dataset_?card)([-._].*)?|.*\.py",
    re.IGNORECASE,
)
_PLAIN_TEXT = (".txt", ".text")
_BESIDE_DATA = "text beside data files; to have it read, name it"


def has_fields(path: str) -> bool:
    """Whether rows of a file have fields, by its name."""
    return FORMATS[_by_name(path)[0] or "text"].has_fields


def about_data(paths: Mapping[str, bool]) -> set[str]:
    """Those of the paths that are text about data; their values say which files have fields."""
    beside = {path.rpartition("/")[0] for path, has_fields in paths.items() if has_fields}
    above: set[str] = set()
    for folder in beside:
        while folder and folder not in above:
            above.add(folder)
            folder = folder.rpartition("/")[0]
    above |= {""} if beside else set()
    found = set()
    for path, has_fields in paths.items():
        folder, _, name = path.rpartition("/")
        is_about = _ABOUT.fullmatch(name) is not None
        is_plain = PurePosixPath(_stem(name)).suffix.lower() in _PLAIN_TEXT
        is_stray = folder in beside and (is_about or not is_plain)
        if not has_fields and (is_stray or (folder in above and is_about)):
            found.add(path)
    return found


def _without_strays(
    found: Sequence[SourceFile], named: set[str], strays: list[Stray]
) -> Iterator[SourceFile]:
    """The files without text that is about data; that is noted."""
    left_out = about_data({file.path: file.traits.has_fields for file in found}) - named
    for file in found:
        if file.path in left_out:
            strays.append(Stray(file, _BESIDE_DATA))
        else:
            yield file


_path = operator.attrgetter("path")


def _first_path(file: SourceFile) -> str:
    return file.members[0].path if file.members else file.path


def source_file(path: str, *, members: Sequence[str] = ()) -> SourceFile:
    """A file, or a group of files, that is known from an earlier discovery, as it is now."""
    if members:
        return make_group(path, [source_file(member) for member in members])
    return _source_file(path, files_module.stat(path))


def _source_file(path: str, facts: FileStat) -> SourceFile:
    # What a key in the address opens is the same file whatever the key is, today's or the next.
    known = shown(path) if files_module.is_remote(path) else path
    form, compression = _by_name(known)
    return SourceFile(
        path=known,
        address=None if known == path else path,
        format=form or "text",
        compression=compression,
        size=facts.size,
        version=facts.version,
        changed=facts.changed,
    )


def _unique(matches: Iterable[FoundFile]) -> list[tuple[FoundFile, FileStat | SourceError]]:
    """Each file once, sorted by path; an error for what is in a folder and is no file."""
    named: dict[str, FoundFile] = {}
    for match in matches:
        if match.named or match.path not in named:
            named[match.path] = match
    seen: set[tuple[object, ...]] = set()
    unique: list[tuple[FoundFile, FileStat | SourceError]] = []
    for match in sorted(named.values(), key=lambda match: match.path):
        try:
            facts = files_module.stat(match.path)
        except SourceError as error:
            if match.named:
                raise
            unique.append((match, error))
            continue
        if facts.key not in seen:
            seen.add(facts.key)
            unique.append((match, facts))
    return unique


def _examine(
    match: FoundFile,
    facts: FileStat | SourceError,
    looked_at: set[tuple[str, str | None, str | None]],
) -> SourceFile | Skipped | Stray:
    path = shown(match.path) if files_module.is_remote(match.path) else match.path
    if isinstance(facts, SourceError):
        is_gone = isinstance(facts.__cause__, FileNotFoundError)
        why = getattr(facts.__cause__, "strerror", None) or facts.__cause__
        return Skipped(path, "cannot be found: a broken link" if is_gone else str(why))
    form, compression = _by_name(path)
    if PurePosixPath(path).name in _DATASET_FILES and not match.named:
        return Skipped(path, _DESCRIPTION)
    if compression is not None and form is not None and FORMATS[form].compresses_itself:
        if match.named:
            raise SourceError(
                f"{path!r} is a {form} file inside {compression}, which is not read",
                hint=f"decompress it; {form} files compress their own content",
            )
        return Skipped(path, f"a {form} file inside {compression}")
    file = _source_file(match.path, facts)
    # Remote files of one folder and one kind are alike: a look into one costs a request.
    kind = (path.rpartition("/")[0], form, compression)
    is_known = form is not None and files_module.is_remote(path) and kind in looked_at
    problem = None if is_known else _problem(file, known=form is not None)
    if problem == _INDENTED and not match.named:
        return Stray(file, problem)
    if problem is None and PurePosixPath(path).name == _DATASET_INFOS and not match.named:
        return Stray(file, _DESCRIPTION)
    if problem is None:
        looked_at.add(kind)
        return file
    if match.named:
        hint = f"name a file with one of these endings: {_KNOWN}"
        if file.format == "jsonl":
            out = shlex.quote(f"{_stem(file.path)}l")
            each = "." if problem == _INDENTED else ".[]"
            hint = f"write it as JSON Lines with: jq -c '{each}' {shlex.quote(file.path)} > {out}"
        raise SourceError(f"{path!r} cannot be used: {problem}", hint=hint)
    return Skipped(path, problem)


_INDENTED = "it is one JSON object over several lines, not JSON Lines (an object on each line)"


def _problem(file: SourceFile, *, known: bool) -> str | None:
    """Why the file cannot be used, from its first bytes; None if it can."""
    is_json = PurePosixPath(_stem(file.path)).suffix.lower() == ".json"
    if known and not is_json:
        return None
    head = b""
    if file.size:
        reader = base.open_decompressed(file)
        try:
            head = reader.read(_SNIFF_BYTES)
        except (OSError, EOFError) as error:
            raise files_module.unreadable(file.path, error) from error
        finally:
            reader.close()
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if is_json and text.startswith(b"["):
        return "it is one JSON array, not JSON Lines (an object on each line)"
    first, newline, _ = text.partition(b"\n")
    if is_json and newline and first.startswith(b"{") and not first.rstrip().endswith(b"}"):
        return _INDENTED
    if b"\0" in head:
        return "binary content"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "not UTF-8 text"
    return None


def _by_name(path: str) -> tuple[str | None, str | None]:
    """Format and compression that the file's name promises."""
    last = PurePosixPath(path).suffix.lower()
    return _BY_SUFFIX.get(PurePosixPath(_stem(path)).suffix.lower()), COMPRESSIONS.get(last)


def _stem(path: str) -> str:
    """The path without the suffix of a compression."""
    suffix = PurePosixPath(path).suffix
    return path[: -len(suffix)] if suffix.lower() in COMPRESSIONS else path


def _without_caches(found: list[SourceFile], skipped: list[Skipped]) -> Iterator[SourceFile]:
    """In a folder of `save_to_disk`, only the Arrow files that its index lists are data."""
    described = (skip.path for skip in skipped if skip.reason == _DESCRIPTION)
    indices = [path for path in described if path.endswith("/" + _DATASET_INDEX)]
    listed = {path.rpartition("/")[0]: _listed_files(path) for path in indices}
    for file in found:
        folder, _, name = file.path.rpartition("/")
        files = listed.get(folder)
        if file.format == "arrow" and files is not None and name not in files:
            skipped.append(Skipped(file.path, f"not among the files of {folder}/{_DATASET_INDEX}"))
        else:
            yield file


def _listed_files(path: str) -> frozenset[str] | None:
    """Names in a dataset's index; None if it is some other file of that name."""
    with files_module.open_binary(path) as file:
        try:
            index = json.loads(file.read())
            return frozenset(str(each["filename"]) for each in index["_data_files"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
