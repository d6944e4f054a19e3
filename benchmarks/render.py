"""Turns results/*.json into the tables of docs/benchmarks.md: `python -m benchmarks.render`.

The text between a pair of markers is replaced, everything else on the page is left alone. Nothing
is measured here, so the page can be made again anywhere, and a test checks that it was.
"""

from __future__ import annotations

import json
import re
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import (
    RESULTS,
    ROOT,
    feed_tables,
    feeding_gpu_table,
    interop_tables,
    long_rows_gpu_table,
    optimizers_gpu_table,
    scaling_table,
    short_builds_table,
    stall_meter_table,
    stalls_gpu,
    supervised_table,
    training_gpu_table,
)
from benchmarks.asking import asking_body
from benchmarks.first_step import first_step_body
from benchmarks.words import words_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PAGE = ROOT / "docs" / "benchmarks.md"
SCALING_PAGE = ROOT / "docs" / "scaling.md"
OWN = "tokenmill"
CEILINGS = ("gigatoken alone, threads", "gigatoken alone, processes", "words alone, processes")
"""The fastest in a table is the ceiling: no build with that engine on these cores can do better."""
OUTSIDE = f"{OWN}, the clock around the command"

Row = dict[str, Any]


def working_seconds(row: Row) -> list[float]:
    """Time of each round without start-up."""
    return [t - s for t, s in zip(row["seconds"], row["startup_seconds"], strict=True)]


def rate(row: Row) -> float:
    """Bytes of text per second, start-up excluded: the median round."""
    return float(row["text_bytes"]) / statistics.median(working_seconds(row))


def ceiling_rate(rows: Iterable[Row]) -> float:
    """The better of the ways to run the engine alone, by its median."""
    return max((rate(r) for r in rows if r["contender"] in CEILINGS and r["seconds"]), default=0.0)


def build_section(results: Mapping[str, Any]) -> str:
    """Everything between the `build` markers."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in results["measurements"]:
        groups.setdefault((row["table"], row["corpus"], row["tokenizer"]), []).append(row)
    engine = [rows for key, rows in groups.items() if key[0] == "engine"]
    peers = [rows for key, rows in groups.items() if key[0] == "peers"]
    parts = [
        _origin(results, _build_packages(results)),
        "### Share of the ceiling",
        _shares(engine),
        "### Beside other ways to tokenize a corpus",
        *(_peer_table(rows, _large(rows[0], engine)) for rows in peers),
        "### Every row",
        *(_engine_table(rows) for rows in engine),
    ]
    return "\n\n".join(parts)


def outside_section(results: Mapping[str, Any]) -> str:
    """Everything between the `outside` markers."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results["measurements"]:
        groups.setdefault((row["corpus"], row["tokenizer"]), []).append(row)
    tables = (_engine_table(rows) for rows in groups.values())
    return "\n\n".join([_origin(results, _build_packages(results)), *tables])


def short_builds_section(results: Mapping[str, Any]) -> str:
    """Everything between the `short_builds` markers."""
    packages = _named(results["versions"], ("tokenmill", "gigatoken", "tokenizers", "numpy"))
    for name in ("datasets", "datatrove"):
        packages += _named(results["peer_versions"].get(name, {}), (name,))
    body = short_builds_table.short_builds_body(results)
    return f"{_origin(results, packages)}\n\n{body}"


def words_section(results: Mapping[str, Any]) -> str:
    """The engine that encodes word by word, beside the packages."""
    packages = _named(results["versions"], ("tokenmill", "sentencepiece", "tokenizers", "pyarrow"))
    return f"{_origin(results, packages)}\n\n{words_body(results)}"


def flatness_section(results: Mapping[str, Any]) -> str:
    """Everything between the `flatness` markers."""
    memory, seconds = results["memory_bytes"], results["seconds"]
    tenth = max(1, len(memory) // 10)
    lines = ["| part of the run | time | largest memory in it |", "| --- | --- | --- |"]
    for part in range(10):
        piece = slice(part * tenth, (part + 1) * tenth if part < 9 else len(memory))
        if memory[piece]:
            until = f"{seconds[piece][-1]:,.0f} s"
            lines.append(f"| tenth {part + 1} | up to {until} | {_gigabytes(max(memory[piece]))} |")
    facts = (
        f"{results['input_bytes'] / 1e9:.2f} GB of JSON Lines with {results['tokenizer']}, "
        f"{results['workers']} workers, `--memory {results['memory_budget']}`: peak "
        f"{_gigabytes(max(memory))} ({results['memory_kind']} of the process tree, sampled every "
        f"{results['sample_seconds']:g} s), {results['documents']:,} documents, "
        f"{results['tokens'] / 1e6:,.0f} million tokens."
    )
    return "\n\n".join([_origin(results, _build_packages(results)), facts, "\n".join(lines)])


def feed_section(results: Mapping[str, Any]) -> str:
    """Everything between the `feed` markers."""
    packages = _named(results["versions"], ("tokenmill", "numpy", "torch", "torchdata"))
    for environment, names in feed_tables.PEER_PACKAGES.items():
        packages += _named(results["peer_versions"].get(environment, {}), names)
    return f"{_origin(results, packages)}\n\n{feed_tables.feed_body(results)}"


def startup_section(results: Mapping[str, Any]) -> str:
    """Everything between the `startup` markers."""
    packages = _named(results["versions"], ("tokenmill", "numpy", "torch"))
    return f"{_origin(results, packages)}\n\n{feed_tables.startup_body(results)}"


def gpu_section(results: Mapping[str, Any]) -> str:
    """Everything between the `feeding_gpu` markers."""
    packages = _named(results["versions"], ("torch", "triton", "numpy"))
    return f"{_origin(results, packages)}\n\n{feeding_gpu_table.gpu_body(results)}"


def stall_meter_section(results: Mapping[str, Any]) -> str:
    """Everything between the `stall_meter` markers, and those of `stall_meter_gpu`."""
    packages = _named(results["versions"], ("tokenmill", "numpy", "torch"))
    return f"{_origin(results, packages)}\n\n{stall_meter_table.stall_meter_body(results)}"


def stalls_section(results: Mapping[str, Any]) -> str:
    """Everything between the `stalls_gpu` markers."""
    packages = _named(results["versions"], ("torch", "tokenizers", "numpy"))
    return f"{_origin(results, packages)}\n\n{stalls_gpu.stalls_body(results)}"


def training_section(results: Mapping[str, Any]) -> str:
    """Everything between the `training_gpu` markers."""
    packages = _named(results["versions"], ("torch", "triton", "tokenizers", "numpy"))
    return f"{_origin(results, packages)}\n\n{training_gpu_table.training_body(results)}"


def optimizers_section(results: Mapping[str, Any]) -> str:
    """Everything between the `optimizers_gpu` markers."""
    packages = _named(results["versions"], ("torch", "triton", "torchao", "bitsandbytes"))
    return f"{_origin(results, packages)}\n\n{optimizers_gpu_table.optimizers_body(results)}"


def long_rows_section(results: Mapping[str, Any]) -> str:
    """Everything between the `long_rows_gpu` markers."""
    packages = _named(results["versions"], ("torch", "triton", "nvidia-cudnn-frontend"))
    return f"{_origin(results, packages)}\n\n{long_rows_gpu_table.long_rows_body(results)}"


def asking_section(results: Mapping[str, Any]) -> str:
    """Everything between the `asking` markers."""
    packages = _named(results["versions"], ("tokenmill", "numpy"))
    return f"{_origin(results, packages)}\n\n{asking_body(results)}"


def first_step_section(results: Mapping[str, Any]) -> str:
    """Everything between the `first_step` markers."""
    packages = _named(results["versions"], ("tokenmill", "gigatoken", "torch", "numpy"))
    return f"{_origin(results, packages)}\n\n{first_step_body(results)}"


BALANCE = (
    *("text", "packing", "ranks", "4 rows", "balanced", "least", "in twos"),
    *("8, balanced", "16", "16, balanced"),
)


def balance_section(results: Mapping[str, Any]) -> str:
    """Everything between the `balance` markers."""
    lines = [
        f"Tokenized with {results['tokenizer']}; the mix is of lengths alone.",
        "",
        f"| {' | '.join(BALANCE)} |",
        f"|{' --- |' * len(BALANCE)}",
    ]
    groups: dict[tuple[str, str, int], dict[tuple[int, int], Row]] = {}
    for row in results["measurements"]:
        group = groups.setdefault((row["text"], row["packing"], row["ranks"]), {})
        group[row["rows"], row["peers"]] = row

    def cell(row: Row, name: str) -> str:
        return f"{row[name]:.3f} ({row[f'{name}_most']:.3f})"

    for facts, (four, eight, many, twos) in ((key, each.values()) for key, each in groups.items()):
        cells = [cell(four, "as_drawn"), cell(four, "balanced"), f"{four['least']:.3f}"]
        cells += [cell(each, "balanced") for each in (twos, eight)]
        cells += [cell(many, "as_drawn"), cell(many, "balanced")]
        lines.append(f"| {' | '.join([*map(str, facts), *cells])} |")
    table = "\n".join(lines)
    return f"{_origin(results, _named(results['versions'], ('tokenmill', 'numpy')))}\n\n{table}"


def interop_section(results: Mapping[str, Any]) -> str:
    """Everything between the `interop` markers."""
    packages = _named(results["versions"], ("tokenmill", "numpy", "pyarrow", "torch"))
    for environment, names in feed_tables.PEER_PACKAGES.items():
        packages += _named(results["peer_versions"].get(environment, {}), names)
    return f"{_origin(results, packages)}\n\n{interop_tables.interop_body(results)}"


def supervised_section(results: Mapping[str, Any]) -> str:
    """Everything between the `supervised` markers."""
    used = ("tokenmill", "gigatoken", "transformers", "tokenizers", "jinja2")
    body = supervised_table.supervised_body(results)
    return f"{_origin(results, _named(results['versions'], used))}\n\n{body}"


def loop_section(results: Mapping[str, Any]) -> str:
    """Everything between the `loop` markers."""
    used = ("tokenmill", "gigatoken", "tokenizers", "sentencepiece")
    lines = [
        "| tokenizer | engine | text | the package | one a call | eight | sixty-four |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["measurements"]:
        plain, *own = row["microseconds"].values()
        cells = [f"{each:,.1f} ({plain / each:.1f} times)" for each in own]
        text = f"{row['characters']:,} characters"
        facts = [row["tokenizer"], row["engine"], text, f"{plain:,.1f}", *cells]
        lines.append(f"| {' | '.join(facts)} |")
    table = "\n".join(lines)
    return f"{_origin(results, _named(results['versions'], used))}\n\n{table}"


def viewing_section(results: Mapping[str, Any]) -> str:
    """Everything between the `viewing` markers."""
    facts = (
        f"A store of {results['tokens']:,} tokens in {results['documents']:,} documents and"
        f" {results['shards']} shards. The first answer came {results['start_seconds']:.2f} s after"
        f" the command. When all was asked the process had {results['own_bytes'] / 1e6:,.0f} MB of"
        f" its own, {results['resident_bytes'] / 1e6:,.0f} MB with pages of files."
    )
    lines = ["| what is asked for | the first time | then |", "| --- | --- | --- |"]
    for row in results["answers"]:
        first, then = (f"{1e3 * row[name]:,.1f} ms" for name in ("first", "median"))
        lines.append(f"| {row['what']} | {first} | {then} |")
    packages = _named(results["versions"], ("tokenmill", "numpy", "starlette", "uvicorn"))
    return "\n\n".join([_origin(results, packages), facts, "\n".join(lines)])


def scaling_section(results: Mapping[str, Any]) -> str:
    """Everything between the `scaling` markers of docs/scaling.md."""
    packages = _named(results["versions"], ("tokenmill", "numpy", "xxhash"))
    return f"{_origin(results, packages)}\n\n{scaling_table.scaling_body(results)}"


def cores_section(results: Mapping[str, Any]) -> str:
    """Everything between the `scaling_cores` markers of docs/scaling.md."""
    packages = _named(results["versions"], ("tokenmill", "gigatoken", "tokenizers", "pyarrow"))
    return f"{_origin(results, packages)}\n\n{scaling_table.cores_body(results)}"


def _build_packages(results: Mapping[str, Any]) -> list[str]:
    used = ("tokenmill", "gigatoken", "tokenizers", "pyarrow", "numpy")
    packages = _named(results["versions"], used)
    for peer, installed in results.get("peer_versions", {}).items():
        packages.append(f"{peer} {installed[peer]} (with tokenizers {installed['tokenizers']})")
    return packages


def _named(versions: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [f"{name} {versions[name]}" for name in names if name in versions]


def _origin(results: Mapping[str, Any], packages: Sequence[str]) -> str:
    machine = results["machine"]
    cores = f"{machine['cores_logical']} logical cores ({machine['cores_physical']} physical)"
    memory = f"{_gigabytes(machine['memory_bytes'])} memory"
    place = ", ".join([machine["cpu"], cores, memory, machine["system"], machine["python"]])
    made = f"{results['date']}, commit {results['commit']}, by `{results['command']}`"
    return f"- Machine: {place}\n- Packages: {', '.join(packages)}\n- Made: {made}"


def _shares(groups: Sequence[Sequence[Row]]) -> str:
    formats = ("jsonl", "parquet", "jsonl.zst")
    lines = [
        f"| text | tokenizer | ceiling | {' | '.join(f'from {f}' for f in formats)} |",
        f"| --- | --- | --- |{' --- |' * len(formats)}",
    ]
    for rows in groups:
        by_name = {row["contender"]: row for row in rows}
        ceiling = ceiling_rate(rows)
        cells = [_share(by_name.get(f"{OWN} from {f}"), ceiling) for f in formats]
        first = rows[0]
        lines.append(
            f"| {first['corpus']} | {first['tokenizer']} | {ceiling / 1e6:,.0f} MB/s "
            f"| {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _engine_table(rows: Sequence[Row]) -> str:
    ceiling = ceiling_rate(rows)
    lines = [
        _title(rows[0]),
        "",
        (
            "| what | MB of text/s | MB of input/s | million tokens/s "
            "| of the ceiling | whole call | peak memory |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["error"]:
            lines.append(f"| {row['contender']} | {_reason(row)} | | | | | |")
            continue
        whole = statistics.median(row["seconds"])
        lines.append(
            f"| {row['contender']} | {_rate_and_spread(row)} | {_input_rate(row)} "
            f"| {_token_rate(row)} | {_share(row, ceiling)} | {whole:.2f} s "
            f"| {_gigabytes(row['peak_memory_bytes'])} |"
        )
    return "\n".join(lines)


def _large(row: Row, engines: Sequence[Sequence[Row]]) -> Row | None:
    """tokenmill's build of the large corpus of the same text, where it was measured."""
    rows = [other for group in engines for other in group]
    same = (row["corpus"], row["tokenizer"], f"{OWN} from jsonl")
    keys = ("corpus", "tokenizer", "contender")
    found = [other for other in rows if tuple(other[key] for key in keys) == same]
    return found[0] if found and not found[0]["error"] else None


def _peer_table(rows: Sequence[Row], large: Row | None) -> str:
    own = next(row for row in rows if row["contender"].startswith(OWN))
    lines = [
        _title(rows[0]),
        "",
        (
            "| what | MB of text/s | whole call | tokenmill is faster | with start-up "
            "| at its rate on the large corpus | peak memory |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["error"]:
            lines.append(f"| {row['contender']} | {_reason(row)} | | | | | |")
            continue
        whole = statistics.median(row["seconds"])
        without, within = _times(row, own)
        there = "" if row is own or large is None else f"{rate(large) / rate(row):,.1f} times"
        lines.append(
            f"| {row['contender']} | {_rate_and_spread(row)} | {whole:.2f} s "
            f"| {without} | {within} | {there} | {_gigabytes(row['peak_memory_bytes'])} |"
        )
    return "\n".join(lines)


def _times(row: Row, own: Row) -> tuple[str, str]:
    """How many times faster tokenmill is, without and with the start-up of both."""
    if row is own or own["error"]:
        return "", ""
    without = rate(own) / rate(row)
    within = statistics.median(row["seconds"]) / statistics.median(own["seconds"])
    return f"{without:,.1f} times", f"{within:,.1f} times"


def _title(row: Row) -> str:
    size = f"{row['input_bytes'] / 1e6:,.0f} MB of JSON Lines"
    text = f"{row['text_bytes'] / 1e6:,.0f} MB of text"
    return f"**{row['corpus']}, {row['tokenizer']}** ({size}, {text})"


def _share(row: Row | None, ceiling: float) -> str:
    if row is None or row["error"] or not ceiling:
        return "-"
    return f"{rate(row) / ceiling:.2f}"


def _rate_and_spread(row: Row) -> str:
    rates = [row["text_bytes"] / s / 1e6 for s in working_seconds(row)]
    digits = 1 if rate(row) < 20e6 else 0
    return f"{rate(row) / 1e6:,.{digits}f} ({min(rates):,.{digits}f} to {max(rates):,.{digits}f})"


def _input_rate(row: Row) -> str:
    """Files as they are on disk, compressed or not; the engine alone reads none."""
    if not row["contender"].startswith(OWN):
        return ""
    return f"{row['input_bytes'] / statistics.median(working_seconds(row)) / 1e6:,.0f}"


def _reason(row: Row) -> str:
    return str(row["error"]).replace("|", "/")


def _token_rate(row: Row) -> str:
    return f"{row['tokens'] / statistics.median(working_seconds(row)) / 1e6:,.1f}"


def _gigabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


SECTIONS = {
    "build": (build_section, "make bench"),
    "outside": (outside_section, "python -m benchmarks.outside"),
    "short_builds": (short_builds_section, "make bench"),
    "words": (words_section, "python -m benchmarks.words"),
    "flatness": (flatness_section, "python -m benchmarks.flatness"),
    "supervised": (supervised_section, "make bench"),
    "loop": (loop_section, "make bench"),
    "feed": (feed_section, "make bench"),
    "startup": (startup_section, "make bench"),
    "interop": (interop_section, "make bench"),
    "first_step": (first_step_section, "python -m benchmarks.first_step"),
    "asking": (asking_section, "python -m benchmarks.asking"),
    "balance": (balance_section, "python -m benchmarks.balance"),
    "feeding_gpu": (gpu_section, "python -m benchmarks.feeding_gpu, on a machine with a GPU"),
    "training_gpu": (
        training_section,
        "python -m benchmarks.training_gpu, on a machine with a GPU",
    ),
    "optimizers_gpu": (
        optimizers_section,
        "python -m benchmarks.optimizers_gpu, on a machine with a GPU",
    ),
    "long_rows_gpu": (
        long_rows_section,
        "python -m benchmarks.long_rows_gpu, on a machine with a GPU",
    ),
    "viewing": (viewing_section, "python -m benchmarks.viewing"),
    "stall_meter": (stall_meter_section, "python -m benchmarks.stall_meter"),
    "stall_meter_gpu": (
        stall_meter_section,
        "python -m benchmarks.stall_meter --cuda, on a machine with a GPU",
    ),
    "stalls_gpu": (stalls_section, "python -m benchmarks.stalls_gpu, on a machine with a GPU"),
}


SCALING_SECTIONS = {
    "scaling": (scaling_section, "python -m benchmarks.scaling"),
    "scaling_cores": (cores_section, "python -m benchmarks.scaling_cores"),
}


def render(
    page: str,
    results: Mapping[str, Mapping[str, Any]],
    sections: Mapping[str, tuple[Callable[[Mapping[str, Any]], str], str]] = SECTIONS,
) -> str:
    """The page with the text between each pair of markers made from the results of that name."""
    for name, (section, command) in sections.items():
        body = section(results[name]) if name in results else f"Not measured yet; run: {command}"
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page must hold {begin!r} and {end!r} once, in this order")
        before, after = pattern.split(page)
        page = f"{before}{begin}\n{body}\n{end}{after}"
    return page


def stored_results() -> dict[str, dict[str, Any]]:
    """Every result that is in benchmarks/results, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), stored_results()))
    SCALING_PAGE.write_text(render(SCALING_PAGE.read_text(), stored_results(), SCALING_SECTIONS))
