"""Compares tokenizers with its release candidate: the speed of one core, and the ids.

    python -m benchmarks.candidate          writes candidate.json; see docs/decisions/0019

Both run as tokenmill's reference engine runs them, on one thread, each in a fresh process, in
turns. Ids are compared on the documents and on texts around every code point up to U+33480.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import RESULTS, ROOT, WORK, corpora, environments, machine, vocabularies

ROUNDS = 3
TEXT_BYTES = 4_000_000
POINTS = [point for point in range(0x80, 0x33480) if not 0xD800 <= point < 0xE000]


def documents() -> list[str]:
    """Every eighth document of the corpus, up to some megabytes."""
    found, size = [], 0
    for line in islice(corpora.base_lines(corpora.available()[0]), 0, None, 8):
        found.append(json.loads(line)["text"])
        size += len(found[-1].encode())
        if size > TEXT_BYTES:
            break
    return found


def around_code_points() -> list[str]:
    return [f"a {c} b{c}c {c}x 1{c}" for c in map(chr, POINTS)]


def trained() -> dict[str, Path]:
    """Name -> tokenizer.json, trained on the spot, of each kind of model but byte-level BPE."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    folder = WORK / "candidate"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for text in documents()[::2] for line in text.splitlines() if line]
    prefix, spaces = str(folder / "unigram"), pre_tokenizers.Metaspace()
    iterator = iter(lines)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iterator, model_prefix=prefix, vocab_size=16_000, minloglevel=2
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(Path(prefix + ".model").read_bytes())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    charsmap = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    collapse = normalizers.Replace(Regex(" {2,}"), " ")
    kinds: dict[str, tuple[Any, Any, Any, Any]] = {
        "Unigram, as T5": (
            models.Unigram(pieces, unk_id=0, byte_fallback=False),
            normalizers.Sequence([charsmap, collapse]),
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces]),
            None,
        ),
        "WordPiece, as BERT uncased": (
            models.WordPiece(unk_token="<unk>"),
            normalizers.BertNormalizer(lowercase=True),
            pre_tokenizers.BertPreTokenizer(),
            trainers.WordPieceTrainer,
        ),
        "BPE, Metaspace and NFKC": (
            models.BPE(unk_token="<unk>"),
            normalizers.NFKC(),
            spaces,
            trainers.BpeTrainer,
        ),
        "BPE, ends of words marked": (
            models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
            normalizers.Lowercase(),
            pre_tokenizers.BertPreTokenizer(),
            trainers.BpeTrainer,
        ),
    }
    paths = {}
    for number, (name, (model, normalizer, split, trainer)) in enumerate(kinds.items()):
        tokenizer = Tokenizer(model)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, split
        if trainer is not None:
            suffix = {"end_of_word_suffix": "</w>"} if "ends" in name else {}
            options = {"vocab_size": 16_000, "special_tokens": ["<unk>"], "show_progress": False}
            tokenizer.train_from_iterator(lines, trainer(**options, **suffix))
        paths[name] = folder / f"{number}.json"
        tokenizer.save(str(paths[name]))
    return paths


def encode(path: Path) -> dict[str, Any]:
    """What the installed package does with a tokenizer.json."""
    from tokenmill.engines.base import SpecialTokens
    from tokenmill.engines.references import HuggingFaceEngine
    from tokenmill.records import TextBatch

    engine = HuggingFaceEngine(path, special_tokens=SpecialTokens.TEXT)
    texts = TextBatch.from_texts(documents())
    begin = time.process_time()
    tokens = engine.encode(texts)
    rate = texts.num_bytes / (time.process_time() - begin) / 1e6
    around = engine.encode(TextBatch.from_texts(around_code_points()))
    ids = [
        [zlib.crc32(each[index].tobytes()) for index in range(len(each))]
        for each in (tokens, around)
    ]
    return {"version": engine.version, "mb_per_second": round(rate, 2), "ids": ids}


def run() -> dict[str, Any]:
    """The rates and differences, and everything a reader needs to judge them."""
    paths = trained()
    paths |= {name: path / "tokenizer.json" for name, path in vocabularies.prepare().items()}
    one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    rows = []
    for name, path in paths.items():
        answers: list[list[dict[str, Any]]] = [[], []]
        for _ in range(ROUNDS):
            for place, package in enumerate(({}, environments.release_candidate())):
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.candidate", str(path)],
                    env=os.environ | one_thread | package,
                    stdout=subprocess.PIPE,
                    cwd=ROOT,
                    check=True,
                )
                answers[place].append(json.loads(done.stdout))
        stable, candidate = (each[0]["ids"] for each in answers)
        rows.append(
            {
                "tokenizer": name,
                "mb_per_second": {
                    each[0]["version"]: median(answer["mb_per_second"] for answer in each)
                    for each in answers
                },
                "documents": len(stable[0]),
                "documents_that_differ": sum(map(int.__ne__, stable[0], candidate[0])),
                "code_points": len(POINTS),
                "code_points_that_differ": sum(map(int.__ne__, stable[1], candidate[1])),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return machine.origin() | {"machine": machine.describe(), "rounds": ROUNDS, "rows": rows}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(encode(Path(sys.argv[1]))))
    else:
        (RESULTS / "candidate.json").write_text(json.dumps(run(), indent=1) + "\n")


if __name__ == "__main__":
    main()
