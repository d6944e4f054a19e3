"""The verb `annotate`: gives the documents of a store columns, from a table or from their sources.

    table with a key ──┐
                       ├─> which row of the table each document has -> columns beside the store
    key of documents ──┘   (its number, its file and row, or a field of its row, read again)

Keys are compared as text, exactly. What is held in memory is the table's key and columns, and four
million keys of documents at a time.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenmill.builder.plan import default_budget, max_document_bytes
from tokenmill.builder.run import source_options
from tokenmill.errors import SourceError, UsageError
from tokenmill.markup import Told
from tokenmill.options import AnnotateOptions, RowShape, with_options
from tokenmill.records import field_of
from tokenmill.selection import joined_keys, keys_of_shard, look_up, require_split, split_keys
from tokenmill.sources.base import Unit, open_source
from tokenmill.sources.discovery import source_file
from tokenmill.sources.objects import OF_PYTHON
from tokenmill.store.annotations import NAME, AnnotationFacts, Labels, Numbers, write_annotation
from tokenmill.store.documents import COLUMNS, Documents, rows_of
from tokenmill.store.reader import Store
from tokenmill.words import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.store.annotations import Column

_HINT = "give a Parquet, CSV, JSON Lines or Arrow file"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotateResult(Told):
    """What the documents of a store were given."""

    store: str
    table: str | None
    key: str | None
    documents: int
    columns: tuple[AnnotationFacts, ...]
    without_row: int
    """Documents for whose key the table has no row: they have no value."""
    unused_rows: int
    """Of the table: no document has their key."""


@with_options(AnnotateOptions)
def annotate(asked: AnnotateOptions) -> AnnotateResult:
    """Give documents columns, which conditions, mixtures and `inspect` then know by name."""
    store = Store(asked.store, split=None)
    if store.view is not None or not isinstance(store.path, Path):
        raise UsageError(
            f"{str(store.path)!r} is "
            + ("a view" if store.view is not None else "no store in a local folder")
            + "; columns are kept in the folder of a store",
            hint="annotate the store itself: its views know the columns too"
            if store.view is not None
            else "annotate a copy of it",
        )
    names = _renamed(asked.columns)
    if asked.table is None:
        if not names or asked.key is not None:
            raise UsageError(
                "without a table, columns are read from the files that the store was built of, and"
                " they have to be named",
                hint="tokenmill annotate STORE --columns lang,url",
            )
        found = {name: from_sources(store, field) for name, field in names.items()}
        facts = _write(store, found, key="source")
        return _result(asked, store, facts)
    if asked.key is None:
        raise UsageError(
            f"{str(asked.table)!r} has a row for each document, and no key says which",
            hint="--key id for a field of the store's sources, --key source,row, or --key document",
        )
    keys = split_keys(asked.key)
    require_split(store, keys, asked.split)
    table = _read_table(Path(asked.table), names, keys)
    places = _match(store, table.select(keys), keys, asked)
    without = int(np.count_nonzero(places < 0))
    used = np.zeros(len(table), np.bool_)
    used[places[places >= 0]] = True
    if not used.any():
        raise UsageError(
            f"no document of {str(store.path)!r} has the {asked.key!r} of any of the"
            f" {len(table):,} rows of {str(asked.table)!r}",
            hint="look at both: they may be written in different ways, or be of other data",
        )
    if without and asked.missing == "error":
        raise UsageError(
            f"{without:,} of {len(places):,} documents have no row in {str(asked.table)!r}, and"
            " would have no value",
            hint="say that this is meant: --missing null; what compares with null is not kept",
        )
    taken = pa.array(places, mask=places < 0)
    values = {
        name: table.column(name).take(taken)
        for name in table.column_names
        if name not in keys or name in names
    }
    return _result(
        asked,
        store,
        _write(store, values, key=asked.key),
        without_row=without,
        unused_rows=len(table) - int(used.sum()),
    )


def _result(
    asked: AnnotateOptions, store: Store, facts: Sequence[AnnotationFacts], **counts: int
) -> AnnotateResult:
    return AnnotateResult(
        store=str(asked.store),
        table=None if asked.table is None else str(asked.table),
        key=asked.key,
        documents=store.num_documents,
        columns=tuple(facts),
        **{"without_row": 0, "unused_rows": 0, **counts},
    )


def _renamed(columns: str | Sequence[str] | None) -> dict[str, str]:
    """Name of a column here -> what it is called where it comes from."""
    given = columns.split(",") if isinstance(columns, str) else columns or ()
    found = {}
    for each in given:
        name, _, original = each.strip().partition("=")
        found[name] = original or name
    for name in found:
        _check_name(name)
    return found


def _check_name(name: str) -> None:
    if name in COLUMNS:
        raise UsageError(
            f"{name!r} is the name of a column that every store has",
            hint=f"give it another one: --columns my_{name}={name}",
        )
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a column",
            hint="use letters, digits, _ . and -, 64 at most: --columns score='Quality score'",
        )


def _write(store: Store, values: Mapping[str, Any], *, key: str) -> list[AnnotationFacts]:
    made = {name: _column(name, array) for name, array in values.items()}
    return [
        write_annotation(store.layout, store.manifest, column, name=name, key=key)
        for name, column in made.items()
    ]


def _column(name: str, array: Any) -> Column:
    """A column of Arrow's as it is kept."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    type_ = array.type
    if pa.types.is_dictionary(type_):
        array = array.dictionary_decode()
        type_ = array.type
    given = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if given is not None and not given.any():
        raise UsageError(f"the column {name!r} has no value for any document", hint="leave it out")
    if pa.types.is_boolean(type_):
        return Numbers(_filled(array, pa.uint8()), given)
    if pa.types.is_integer(type_):
        return Numbers(_filled(array, pa.int64()), given)
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return Numbers(_filled(array, pa.float64()), given)
    if pa.types.is_nested(type_) or pa.types.is_binary(type_):
        raise UsageError(
            f"the column {name!r} is of type {type_}; a column holds text, numbers or flags",
            hint="leave it out: --columns with the names of the others",
        )
    encoded = array.cast(pa.large_string()).dictionary_encode()
    places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return Labels(tuple(encoded.dictionary.to_pylist()), places.astype(np.int64))


def _filled(array: Any, type_: Any) -> NDArray[Any]:
    values = array.cast(type_).fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray(values, type_.to_pandas_dtype())


# -------------------------------------------------------------------------------------------------
# The table, and which of its rows each document has.


def _read_table(path: Path, names: Mapping[str, str], keys: Sequence[str]) -> Any:
    """The keys and the columns that are asked for (all, where none are), by their new names."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}", hint=_HINT)
    try:
        table = _table_of(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"{str(path)!r} cannot be read: {error}", hint=_HINT) from error
    has = table.column_names
    lacking = [each for each in (*keys, *names.values()) if each not in has]
    doubled = sorted({each for each in has if has.count(each) > 1})
    if lacking or doubled:
        problem = f"no column {lacking[0]!r}" if lacking else f"two columns {doubled[0]!r}"
        raise UsageError(
            f"{str(path)!r} has {problem}; its columns are: {', '.join(has)}",
            hint="correct --key or --columns",
        )
    wanted = names or {name: name for name in has if name not in keys}
    if not wanted:
        raise UsageError(
            f"{str(path)!r} has no column but its key", hint="give one with values beside it"
        )
    for name in wanted:
        _check_name(name)
    columns = {key: table.column(key) for key in keys}
    return pa.table(columns | {name: table.column(old) for name, old in wanted.items()})


def _table_of(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path)
    if suffix in (".csv", ".tsv"):
        import pyarrow.csv as pc_csv

        options = pc_csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")
        empty_is_null = pc_csv.ConvertOptions(strings_can_be_null=True)
        return pc_csv.read_csv(path, parse_options=options, convert_options=empty_is_null)
    if suffix in (".jsonl", ".ndjson", ".json"):
        import pyarrow.json as pa_json

        return pa_json.read_json(path)
    if suffix in (".arrow", ".feather"):
        import pyarrow.feather as feather

        return feather.read_table(path)
    raise UsageError(f"{str(path)!r} is of no kind that is read here", hint=_HINT)


def _match(store: Store, table: Any, keys: Sequence[str], asked: AnnotateOptions) -> NDArray[Any]:
    """For each document the row of the table with its key; -1 for none."""
    wanted = joined_keys([table.column(key) for key in keys])
    if wanted.null_count:
        raise UsageError(
            f"{str(asked.table)!r} has no {asked.key!r} in {count(wanted.null_count, 'row')}, so"
            " nothing says whose that is",
            hint="leave them out of the table",
        )
    counts = wanted.value_counts() if len(pc.unique(wanted)) < len(wanted) else ()
    for each in counts:
        if (number := each["counts"].as_py()) > 1:
            shown = each["values"].as_py()
            raise UsageError(
                f"{number:,} rows of {str(asked.table)!r} have the {asked.key!r} {shown!r}: nothing"
                " says which of their values is meant",
                hint="give one row for each key",
            )
    documents = Documents(store)

    def keys_of(number: int) -> Any:
        def field(number: int, key: str) -> Any:
            return _field_of_shard(store, number, key)

        return keys_of_shard(documents, number, keys, split=asked.split, field=field)

    found = [places for _, places in look_up(keys_of, len(store.shards), wanted)]
    return np.concatenate([np.zeros(0, np.int64), *found])


# -------------------------------------------------------------------------------------------------
# A field of the rows that documents were made of, read from the sources again.


def from_sources(store: Store, field: str) -> Any:
    """The values that the rows of all documents have for a field, as a column of Arrow's."""
    parts = [_field_of_shard(store, number, field) for number in range(len(store.shards))]
    types = {part.type for part in parts if not pa.types.is_null(part.type)}
    if types == {pa.int64(), pa.float64()}:
        types = {pa.float64()}
    if len(types) > 1:
        shown = ", ".join(sorted(map(str, types)))
        raise UsageError(
            f"the field {field!r} of the sources of {str(store.path)!r} is of several types:"
            f" {shown}",
            hint="annotate from a table of your own, with one type: --key source,row",
        )
    if not types:
        raise UsageError(
            f"no row of the sources of {str(store.path)!r} has a field {field!r}",
            hint="correct the name; dots reach into objects: --columns meta.lang",
        )
    (type_,) = types
    return pa.chunked_array([part.cast(type_) for part in parts], type_)


def _field_of_shard(store: Store, shard: int, field: str) -> Any:
    receipt, facts = store.facts_of(shard)
    unit, config = receipt.unit, store.manifest.identity.config
    if unit.path.startswith(OF_PYTHON) or config.get("import") is not None:
        raise UsageError(
            f"{str(store.path)!r} was not built of files with rows, so no field {field!r} of them"
            " can be read",
            hint="annotate by --key document, with the numbers of documents, or source,row",
        )
    file = source_file(unit.path, members=unit.members)
    if (file.size, file.version) != (receipt.source.size, receipt.source.version):
        raise SourceError(
            f"{file.title} changed since the store was built: the field {field!r} may be of other"
            " rows",
            hint="build the store again, or annotate by --key source,row",
        )
    largest = max(max_document_bytes(default_budget()), receipt.bounds.largest_row_bytes)
    options = source_options(config, RowShape.of_identity(config), max_document_bytes=largest)
    options = dataclasses.replace(options, fields=(field,), needs_all_fields=True)
    values: list[Any] = [None] * receipt.counts.rows
    place = Unit(file=file, index=unit.index, start=unit.start, end=unit.end)
    with closing(open_source(file, options)) as source:
        for batch in source.read(place):
            for number, row in enumerate(batch.rows.tolist()):
                values[row] = _value(batch.texts.bytes_at(number), field)
    try:
        found = pa.array([values[row] for row in rows_of(facts).tolist()])
    except (pa.ArrowException, OverflowError) as error:
        raise UsageError(
            f"the field {field!r} of {file.title} is of several types: {error}",
            hint="annotate from a table of your own, with one type: --key source,row",
        ) from error
    return found


def _value(text: bytes, field: str) -> Any:
    try:
        return field_of(json.loads(text), field)
    except (KeyError, ValueError):  # what is no JSON was rejected: no document is of it
        return None
