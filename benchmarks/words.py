"""Times the engine `words` beside the packages it stands for, on one core, cold and warm.

    python -m benchmarks.words             writes words.json, which the page is made of
    python -m benchmarks.words --builds    the builds alone; the other rows stay

Tokenizers are trained on a part of the English corpus, with the packages' defaults. Each is
measured in a process of its own: the package encodes a share of the documents as a list, in one
thread; the engine encodes all of them with an empty cache (cold), and then again (warm); of the
first corpus without its compiled part too. CPU time counts: one thread works, and others may keep
the machine busy meanwhile. Whole builds with SentencePiece models, in one process, are beside a
script that reads the same lines, calls the package for each text, and writes the ids.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks import ROOT, WORK, corpora, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

ROUNDS = 3
PACKAGE_BYTES = 4 * corpora.MEGABYTE  # what a package is given: it is slow, and warms up at once
TRAINING_BYTES = 3 * corpora.MEGABYTE
BATCH_BYTES = 4 << 20
VOCABULARY = 16_000
KINDS = {
    "sentencepiece-bpe": "SentencePiece BPE, defaults",
    "sentencepiece-unigram": "SentencePiece Unigram, defaults",
    "wordpiece": "WordPiece tokenizer.json, as BERT's",
    "unigram-json": "Unigram tokenizer.json, as T5's",
}


def texts_of(corpus: str) -> list[str]:
    """The documents of a corpus as it is."""
    return [json.loads(line)["text"] for line in corpora.base_lines(corpus)]


def prepare() -> dict[str, Path]:
    """Kind -> tokenizer, made once, of a part of the first corpus."""
    folder = WORK / "words"
    folder.mkdir(parents=True, exist_ok=True)
    texts = texts_of(corpora.available()[0])
    sample = texts[:: max(1, sum(map(len, texts)) // TRAINING_BYTES)]
    return {kind: train(kind, sample, folder) for kind in KINDS}


def train(kind: str, texts: Sequence[str], folder: Path) -> Path:
    """The tokenizer of a kind, made once."""
    import sentencepiece
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    path = folder / f"{kind}.{'model' if kind.startswith('sentencepiece') else 'json'}"
    if path.exists():
        return path
    if kind == "wordpiece":
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(
            vocab_size=VOCABULARY, special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))
        return path
    model_type = "bpe" if kind == "sentencepiece-bpe" else "unigram"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line),
        model_prefix=str(folder / model_type),
        model_type=model_type,
        vocab_size=VOCABULARY,
        minloglevel=2,
    )
    made = folder / f"{model_type}.model"
    if path.suffix == ".model":
        return made.rename(path)
    # The same pieces as a tokenizer.json, as converters write it.
    from tokenmill.engines.references import read_sentencepiece_model

    processor = sentencepiece.SentencePieceProcessor(model_file=str(made))
    pieces = [
        (processor.id_to_piece(number), processor.get_score(number))
        for number in range(processor.get_piece_size())
    ]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=processor.unk_id()))
    table = normalizers.Precompiled(read_sentencepiece_model(made).charsmap)
    tokenizer.normalizer = normalizers.Sequence(
        [table, normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(path))
    return path


def package_encode(path: Path) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """The call that people write with the package itself."""
    if path.suffix == ".model":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return lambda texts: processor.encode(texts, num_threads=1)
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # they are text in a text, as for a build

    def encode(texts: list[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode


def measure(kind: str, corpus: str, path: Path, rounds: int, is_compiled: bool) -> dict[str, Any]:
    """One row: rates of the package and of the engine, and whether they agreed."""
    os.environ["TOKENMILL_KERNEL"] = str(int(is_compiled))
    from tokenmill.engines import find_kernel
    from tokenmill.engines.load import load_engine
    from tokenmill.engines.words import WordEngine
    from tokenmill.records import TextBatch, cut_ranges

    texts = texts_of(corpus)
    few = texts[: _count(texts, PACKAGE_BYTES)]
    whole = TextBatch.from_texts(texts)
    batches = [
        TextBatch(whole.data, whole.offsets[first : last + 1])
        for first, last in cut_ranges(whole.offsets, BATCH_BYTES)
    ]
    encode = package_encode(path)
    engine = load_engine(path)
    if is_compiled != (find_kernel() is not None):
        raise RuntimeError("the engine is not compiled here: pip install --editable . again")
    row: dict[str, Any] = {"kind": kind, "corpus": corpus, "engine": engine.name}
    row["is_compiled"] = is_compiled
    row |= {"text_bytes": whole.num_bytes, "package_bytes": sum(len(t.encode()) for t in few)}
    timed: dict[str, list[float]] = {"package": [], "cold": [], "warm": []}
    expected: Sequence[Sequence[int]] = ()
    equal = True
    for _ in range(rounds):
        begun = time.process_time()
        expected = encode(few)
        timed["package"].append(time.process_time() - begun)
        if isinstance(engine.fast, WordEngine):
            engine.recycle()
        for name in ("cold", "warm"):
            begun = time.process_time()
            found = [engine.encode(batch) for batch in batches]
            timed[name].append(time.process_time() - begun)
        ids = (ids for tokens in found for ids in tokens)
        equal &= all(one.tolist() == list(other) for one, other in zip(ids, expected, strict=False))
    return row | {"seconds": timed, "is_equal": equal}


def script(path: Path, source: Path, out: Path) -> None:
    """What people write who build without tokenmill."""
    import numpy as np
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    with source.open(encoding="utf-8") as lines, out.open("wb") as file:
        for line in lines:
            ids = processor.encode(json.loads(line)["text"])
            np.array([*ids, processor.eos_id()], np.uint16).tofile(file)


def measure_build(kind: str, corpus: str, path: Path, rounds: int) -> dict[str, Any]:
    """One row: a build from its first call to its end, and the script."""
    import tokenmill

    folder = WORK / "words" / "build"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    source, store = folder / "text.jsonl", folder / "store"
    source.write_bytes(b"".join(corpora.base_lines(corpus)))
    seconds: dict[str, list[float]] = {"script": [], "build": []}
    for _ in range(rounds):
        begun = time.process_time()
        script(path, source, folder / "ids.bin")
        seconds["script"].append(time.process_time() - begun)
        shutil.rmtree(store, ignore_errors=True)
        begun = time.process_time()
        result = tokenmill.build(
            source, tokenizer=path, out=store, serial=True, memory="2GB", max_unknown=1.0
        )
        seconds["build"].append(time.process_time() - begun)
    assert result.totals is not None
    ids = b"".join(shard.read_bytes() for shard in sorted((store / "shards").glob("*.bin")))
    row: dict[str, Any] = {"kind": kind, "corpus": corpus, "seconds": seconds}
    row |= {"text_bytes": result.totals.text_bytes, "documents": result.totals.documents}
    row["is_equal"] = ids == (folder / "ids.bin").read_bytes()
    shutil.rmtree(folder)
    return row


def run_builds(rounds: int) -> dict[str, Any]:
    """Rows of the kinds whose package has a file of its own."""
    rows = []
    for kind, path in prepare().items():
        for corpus in corpora.available() if kind.startswith("sentencepiece") else ():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure_build, (kind, corpus, path, rounds)))
            print(rows[-1], file=sys.stderr, flush=True)
    facts = {"machine": machine.describe(), "rounds": rounds, "measurements": rows}
    return machine.origin() | facts


def _count(texts: Sequence[str], most_bytes: int) -> int:
    """How many texts there are in so many bytes."""
    for number, text in enumerate(texts):
        most_bytes -= len(text.encode())
        if most_bytes < 0:
            return number + 1
    return len(texts)


def run(rounds: int) -> dict[str, Any]:
    """All rows, and everything a reader needs to judge them."""
    rows = []
    for kind, path in prepare().items():
        first, *others = corpora.available()
        for corpus, is_compiled in ((first, True), (first, False), *((c, True) for c in others)):
            if kind == "sentencepiece-unigram" and not is_compiled:
                continue  # it is the package then
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (kind, corpus, path, rounds, is_compiled)))
            print(rows[-1], file=sys.stderr, flush=True)
    return machine.origin() | {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "rounds": rounds,
        "vocabulary": VOCABULARY,
        "measurements": rows,
        "builds": run_builds(rounds),
    }


def words_body(results: Mapping[str, Any]) -> str:
    """The table of results/words.json."""
    lines = [
        "| tokenizer | text | the package, MB/s | cold | warm | cold, times | warm, times |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in results["measurements"]:
        seconds = {name: statistics.median(each) for name, each in row["seconds"].items()}
        package = row["package_bytes"] / seconds["package"] / 1e6
        cold, warm = (row["text_bytes"] / seconds[name] / 1e6 for name in ("cold", "warm"))
        shown = " | ".join(f"{rate:.1f}" for rate in (package, cold, warm, cold / package))
        text = row["corpus"] + ("" if row.get("is_compiled", True) else ", not compiled")
        lines.append(f"| {KINDS[row['kind']]} | {text} | {shown} | {warm / package:.1f} |")
    equal = all(row["is_equal"] for row in results["measurements"])
    facts = (
        f"Vocabularies of {results['vocabulary']:,}, trained on English; one thread, CPU time; "
        f"rounds: {results['rounds']}, of which the median counts. The ids are those of the package"
        f"{'.' if equal else ', BUT NOT ALL.'}"
    )
    tables = [facts, "\n".join(lines)]
    if builds := results.get("builds"):
        said = (
            f"Whole builds, made {builds['date']} at commit {builds['commit']}"
            f" ({builds['machine']['cpu']}, rounds: {builds['rounds']}): from JSON Lines,"
            " with the model's loading, the checks against the package and a synced store, in one"
            " process; the script reads the same lines, calls `sp.encode(text)` for each, and"
            " writes the ids, which are the store's"
            f"{'.' if all(row['is_equal'] for row in builds['measurements']) else ', BUT NOT ALL.'}"
        )
        lines = [
            "| tokenizer | text | script, MB/s | documents/s | build, MB/s | documents/s | times |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in builds["measurements"]:
            each = [statistics.median(row["seconds"][name]) for name in ("script", "build")]
            rates = [
                f"{row['text_bytes'] / one / 1e6:.1f} | {row['documents'] / one:,.0f}"
                for one in each
            ]
            cells = [KINDS[row["kind"]], row["corpus"], *rates, f"{each[0] / each[1]:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        tables += [said, "\n".join(lines)]
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description="time the engine of words")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--builds", action="store_true", help="the builds alone")
    asked = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / "words.json"
    if asked.builds:
        results = json.loads(path.read_text()) | {"builds": run_builds(asked.rounds)}
    else:
        results = run(asked.rounds)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
