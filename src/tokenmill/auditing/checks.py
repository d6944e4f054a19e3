"""`tokenmill audit`: reads batches of anybody's loader and says what is wrong, in numbers.

    loader --reading.py--> rows (ids, labels, boundaries, without padding) --Audit--> findings
    store  --lookup.py--> where in the text each row comes from

A loader is a function that gives batches (dicts, pairs or arrays of ids), or an iterable of them.
With a store, or text that becomes one, each row is looked up in its documents, so that what is left
out, repeated, cut off or trained on by mistake can be counted. What cannot be known without
something that was not given is listed as unchecked and never guessed: "nothing found" is said of
what was checked, and of nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tokenmill.auditing.lookup import WINDOW, Lookup, Overlap
from tokenmill.auditing.reading import (
    AuditedLoader,
    AuditRow,
    RankRows,
    read_batches,
    read_ranks,
    rows_of,
)
from tokenmill.builder.run import build
from tokenmill.engines.load import describe, find_tokenizer
from tokenmill.errors import UsageError
from tokenmill.loader.batch import IGNORED
from tokenmill.options import AuditOptions, unheard, with_options
from tokenmill.sources.discovery import TRAIN, about_data, has_fields, split_told
from tokenmill.store.reader import Store
from tokenmill.supervised.chat import ends_turns
from tokenmill.words import count, listed, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tokenmill.auditing.lookup import Bools, Ids
    from tokenmill.engines.base import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """Something that makes training go wrong: which, how much of it, a row that shows it."""

    kind: str
    problem: str
    example: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """What was read, what is wrong with it, and what could not be known."""

    loader: str
    ranks: int
    batches: int
    rows: int
    places: int  # of tokens, padding among them
    padding: int
    labels: str | None  # "next", "same", or neither
    epoch_is_whole: bool
    findings: tuple[AuditFinding, ...]
    remarks: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


# Batches that are compared before and after a resume.
FEW = 4
OF_LABELS = {"next": "the next tokens", "same": "the tokens themselves"}
LOOKED_AT = 5000  # documents of which the file is asked
MUCH_PADDING = 0.25
SEEN = 0.999  # of labels, to say what they are
SOME = 0.002  # of tokens or rows: less is the end of an epoch, or chance


def is_held_out(name: str) -> bool:
    """Whether any word of a file's name tells another split than that for training."""
    return any(split_told([word]) not in (None, TRAIN) for word in re.split(r"[_.\-]", name))


class Audit:
    """One audit: what is known, and what was found."""

    def __init__(self, asked: AuditOptions, store: Store | None) -> None:
        self.asked = asked
        self.store = store
        self.findings: list[AuditFinding] = []
        self.remarks: list[str] = []
        self.unchecked: list[str] = []
        self.engine: Engine | None = None if store is None else store.reference
        self.special: Mapping[str, int] = {}
        self.eos_id: int | None = None if store is None else store.eos_id
        self.bos_id: int | None = None if store is None else store.bos_id
        tokenizer = asked.tokenizer or (None if store is None else store.tokenizer_dir)
        if store is not None and store.manifest.identity.tokenizer.kind == "bytes":
            tokenizer = asked.tokenizer or "bytes"
        self.tokenizer = tokenizer
        if tokenizer is not None:
            info = describe(str(tokenizer), policy=None)
            self.special = info.special_tokens
            known = {**info.other_tokens, **info.special_tokens}
            if self.eos_id is None:
                self.eos_id = known.get(info.eos_token or "")
            if self.bos_id is None:
                self.bos_id = known.get(info.bos_token or "")
        pads = {id_ for name, id_ in self.special.items() if "pad" in name.lower()}
        self.pads = pads | {each for each in (self.eos_id, self.bos_id) if each is not None} | {0}

    def find(self, kind: str, problem: str, *, example: str = "", hint: str = "") -> None:
        self.findings.append(AuditFinding(kind=kind, problem=problem, example=example, hint=hint))

    def text(self, ids: NDArray[Any]) -> str:
        """A few ids as they can be read."""
        return repr(self.engine.decode(ids.tolist())) if self.engine else str(ids.tolist())

    # ---------------------------------------------------------------------------------------------

    def labels(self, rows: Sequence[AuditRow]) -> str | None:
        """What labels are: the token itself, the next one, or neither."""
        having = [row for row in rows if row.labels is not None and len(row.ids) > 3]
        if not having:
            self.unchecked.append("labels: the batches have none")
            return None
        equal = dict.fromkeys(range(-1, 4), 0)
        total = dict.fromkeys(equal, 0)
        for row in having:
            labels = cast("Ids", row.labels)
            for shift in equal:
                # The label at a place beside the token so many places on.
                low, high = max(0, -shift), len(labels) - max(0, shift)
                mine = labels[low:high]
                counted = mine != IGNORED
                equal[shift] += int((mine == row.ids[low + shift : high + shift])[counted].sum())
                total[shift] += int(counted.sum())
        if not any(total.values()):
            self.find(
                "labels",
                f"every label of {count(len(having), 'row')} is {IGNORED}, so nothing is learned",
                hint="see why the loss mask leaves everything out",
            )
            return None
        shares = {shift: equal[shift] / max(1, total[shift]) for shift in equal}
        best = max(shares, key=lambda shift: (shares[shift], -abs(shift)))
        if best in (0, 1) and shares[best] >= SEEN:
            return "same" if best == 0 else "next"
        row = having[0]
        hint = "a label is the token itself (labels=same) or the one after it (labels=next)"
        if shares[best] >= SEEN:
            where = {2: "after the next one", 3: "three places on", -1: "before it"}[best]
            problem = f"each label is the token {where}: labels were shifted twice"
        else:
            problem = (
                f"labels are not the next tokens: {share(equal[1], max(1, total[1]))} of them are,"
                f" and {share(equal[0], max(1, total[0]))} are the tokens themselves"
            )
        shown = (
            f"{row.name}: ids {row.ids[:6].tolist()}, labels {cast('Ids', row.labels)[:6].tolist()}"
        )
        self.find("labels", problem, example=shown, hint=hint)
        return None

    def shifts(self, labels: str | None) -> None:
        """Whether the model shifts labels that are shifted already, or nobody does."""
        expected = self.asked.expected
        if labels is None:
            return
        if expected is None:
            self.unchecked.append(
                f"labels shifted twice: these are {OF_LABELS[labels]}; what the model expects was"
                " not given (--labels next|same)"
            )
        elif (labels, expected) == ("next", "same"):
            self.find(
                "shifted-twice",
                "labels are the next tokens already, and the model shifts them again, as all models"
                " of transformers do: it learns the token after the next one",
                hint="give it labels that equal input_ids",
            )
        elif labels != expected:
            self.find(
                "not-shifted",
                "labels are the tokens themselves, and the model does not shift them: it learns to"
                " repeat its input",
                hint="give it the next tokens: inputs row[:-1], labels row[1:]",
            )

    def padding(self, rows: Sequence[AuditRow], places: int) -> None:
        """Padding, and whether it is learned."""
        padded = sum(row.padding for row in rows)
        trained = [row for row in rows if row.trained_padding]
        if padded > MUCH_PADDING * places:
            worst = max(rows, key=lambda row: row.padding)
            self.find(
                "padding",
                f"{share(padded, places)} of all places are padding, on which the device"
                " computes too",
                example=f"{worst.name}: {count(len(worst.ids), 'token')}, {worst.padding:,} of"
                " padding",
                hint="pack documents into rows; see what each packing would leave: tokenmill"
                " layout",
            )
        if trained:
            number = sum(row.trained_padding for row in trained)
            self.find(
                "padding-is-learned",
                f"{count(number, 'label')} of padding in {count(len(trained), 'row')} count for"
                " the loss",
                example=f"{trained[0].name} ends in {trained[0].padding:,} equal ids with labels",
                hint=f"set the labels of padding to {IGNORED}",
            )

    def ranks(self, readings: Sequence[RankRows]) -> None:
        """Rows that several ranks read."""
        if len(readings) == 1:
            self.unchecked.append("ranks that see the same rows: one was read (--ranks 2)")
            return
        seen: dict[bytes, AuditRow] = {}
        double: list[tuple[AuditRow, AuditRow]] = []
        for reading in readings:
            for row in reading.rows:
                other = seen.setdefault(row.ids.tobytes(), row)
                if other.rank != row.rank and len(row.ids) > WINDOW:
                    double.append((other, row))
        total = sum(len(reading.rows) for reading in readings)
        if len(double) > max(1, SOME * total):
            one, two = double[0]
            self.find(
                "same-rows-on-ranks",
                f"{share(2 * len(double), total)} of the rows are read by more than one rank, so"
                " they are learned more than once",
                example=f"rank {one.rank}, {one.name} = {two.name}",
                hint="let each rank read rows of its own: pass rank and world_size on",
            )
        if empty := [str(rank) for rank, reading in enumerate(readings) if not reading.rows]:
            self.find("same-rows-on-ranks", f"rank {listed(empty)} got no rows at all")

    def epochs(self, source: AuditedLoader, first: RankRows, loader: Any) -> None:
        """Whether a second epoch comes in another order."""
        again: Any = None
        if "epoch" in source.takes:
            again = source.make(rank=0, world_size=self.asked.ranks, epoch=1, skip=0)
        elif first.is_whole and loader is not None and is_read_anew(loader):
            again = loader
        if again is None or first.batches < 2:
            batches = count(self.asked.batches, "batch", plural="batches")
            if first.batches < 2:
                why = "the first has one batch"
            elif not first.is_whole:
                why = f"the first did not end within {batches}, and the function takes no `epoch`"
            else:
                why = "the loader was read once, and the function takes no `epoch` (0, then 1)"
            self.unchecked.append(f"order of a second epoch: {why}")
            return
        second = read_batches(again, batches=first.batches, rank=0, pads=self.pads)
        mine, other = ([row.ids.tobytes() for row in each.rows] for each in (first, second))
        if mine and mine == other[: len(mine)] and len(set(mine)) > 1:
            self.find(
                "same-order",
                f"the second epoch has the same {count(len(mine), 'row')} in the same order as"
                " the first",
                hint="shuffle by a seed that changes with the epoch (set_epoch, or a new"
                " permutation)",
            )

    def resume(self, source: AuditedLoader, first: RankRows) -> None:
        """Whether a loader that was saved and made again goes on with the batch that comes next."""
        known = {"rank": 0, "world_size": self.asked.ranks, "epoch": 0}
        expected: list[AuditRow]
        if first.batches < 3:
            self.unchecked.append("resume: there are fewer than three batches")
            return
        used = min(FEW, first.batches // 2)
        if "skip" in source.takes:
            again = source.make(**known, skip=used)
            expected = [row for row in first.rows if used <= row.batch < 2 * used]
        elif source.is_function and hasattr(loader := source.make(**known), "state_dict"):
            iterator = iter(loader)
            for _ in itertools.islice(iterator, used):
                pass
            state = copy.deepcopy(loader.state_dict())
            rest = itertools.islice(iterator, used)
            expected = [
                row
                for number, batch in enumerate(rest)
                for row in rows_of(batch, rank=0, number=used + number, pads=self.pads)
            ]
            again = source.make(**known)
            again.load_state_dict(state)
        else:
            self.unchecked.append(
                "resume: the loader has no state_dict, and its function takes no `skip` (batches"
                " that were used before)"
                if source.is_function
                else "resume: the loader itself was given; a function that makes it can be called"
                " again (for a state_dict, or with `skip`, batches that were used before)"
            )
            return
        found = read_batches(again, batches=used, rank=0, pads=self.pads, first=used).rows
        if [row.ids.tobytes() for row in expected] != [row.ids.tobytes() for row in found]:
            begin = [row.ids.tobytes() for row in first.rows if row.batch < used]
            anew = [row.ids.tobytes() for row in found][: len(begin)] == begin
            what = (
                "begins anew with batch 0" if anew else "gives other rows than the run it continues"
            )
            self.find(
                "resume",
                f"resumed after {count(used, 'batch', plural='batches')}, the loader {what}",
                example=""
                if not expected
                else f"expected first: {self.text(expected[0].ids[:12])}",
                hint="save where the loader is, and go on there",
            )

    # --------------------------------------------------------------------------- with documents

    def lookup(self, rows: Sequence[AuditRow], labels: str | None, is_whole: bool) -> None:
        """All that is known by where in a store rows come from."""
        assert self.store is not None
        documents = Lookup(self.store)
        found = [(row, documents.find(row.ids)) for row in rows]
        if labels == "next":
            for row, runs in found:
                # The last label of a row need not be an input of any.
                if runs and runs[-1].at + runs[-1].length == len(row.ids):
                    place = runs[-1].place + runs[-1].length
                    last = cast("Ids", row.labels)[-1]
                    if place < len(documents.ids) and documents.ids[place] == last:
                        documents.was_label[place] = True
        self._foreign(found)
        self._coverage(documents, rows, is_whole)
        self._ends(documents)
        self._doubled(documents, found)
        self._from_text(documents, found)
        self._prompts(documents, found, labels)
        begins = {id(row): documents.begins(runs, len(row.ids)) for row, runs in found}
        self.boundaries(rows, begins, matters=documents.mask is not None)

    def _foreign(self, found: Sequence[tuple[AuditRow, list[Overlap]]]) -> None:
        """Tokens that are not of the text."""
        lost, total, example = 0, 0, ""
        for row, runs in found:
            free = np.ones(len(row.ids), bool)
            for run in runs:
                free[run.at : run.at + run.length] = False
            free &= ~np.isin(row.ids, list({*self.special.values(), *self.pads}))
            lost, total = lost + int(free.sum()), total + len(row.ids)
            if not example and free.sum() > WINDOW:
                first = int(np.flatnonzero(free)[0])
                example = f"{row.name}, token {first}: {self.text(row.ids[first : first + 16])}"
        if lost > 10 * SOME * total:
            self.find(
                "other-text",
                f"{share(lost, total)} of the tokens read are not those of the text given",
                example=example,
                hint="give the store, split and tokenizer that the loader reads",
            )

    def _coverage(self, documents: Lookup, rows: Sequence[AuditRow], is_whole: bool) -> None:
        """Tokens that never come, or come twice."""
        if not is_whole:
            self.unchecked.append(
                "tokens that never come or come twice: the epoch did not end within"
                f" {count(self.asked.batches, 'batch', plural='batches')} (--batches)"
            )
            return
        never = (documents.times_read == 0) & ~documents.was_label
        twice = documents.times_read > 1
        for copies, times in documents.copies():
            # Of texts that are there several times it does not matter which was read.
            never &= (copies == 1) | (times < copies)
            twice &= (copies == 1) | (times > copies)
        for id_, places in ((self.eos_id, documents.ends - 1), (self.bos_id, documents.starts)):
            if id_ is not None:
                edges = places[documents.ids[np.minimum(places, len(never) - 1)] == id_]
                never[edges] = False
        longest = max((len(row.ids) + row.padding for row in rows), default=0)
        batch = len([row for row in rows if row.batch == 0]) * longest
        total = len(documents.ids)
        allowed = max(SOME * total, batch + longest) if documents.every == 1 else 0.02 * total
        if never.sum() > min(allowed, 0.2 * total):
            sums = np.add.reduceat(never, documents.starts[documents.ends > documents.starts])
            sizes = (documents.ends - documents.starts)[documents.ends > documents.starts]
            whole, cut = (
                int((sums >= sizes - 2).sum()),
                int(((sums > 0) & (sums < sizes - 2)).sum()),
            )
            first = int(np.flatnonzero(never)[0])
            number = documents.document_at(first)
            self.find(
                "never-read",
                f"{share(int(never.sum()), total)} of the tokens never come in an epoch:"
                f" {count(whole, 'document')} not at all, {count(cut, 'document')} in part",
                example=f"document {number} from its token {first - int(documents.starts[number])}"
                f" on: {self.text(documents.ids[first : first + 16])}",
                hint="split what is longer than a row, and keep what is left over for the next one",
            )
        if twice.sum() > min(allowed, 0.2 * total):
            first = int(np.flatnonzero(twice)[0])
            self.find(
                "read-twice",
                f"{share(int(twice.sum()), total)} of the tokens come more than once in an epoch,"
                f" up to {int(documents.times_read.max())} times",
                example=f"document {documents.document_at(first)}:"
                f" {self.text(documents.ids[first : first + 16])}",
                hint="read each row once: on one rank, in one worker",
            )

    def _ends(self, documents: Lookup) -> None:
        """End and begin tokens that the text has and the rows have not."""
        sizes = documents.ends - documents.starts
        edges = (
            ("eos", "end", documents.eos_id, documents.ends - 1, -1),
            ("bos", "begin", documents.bos_id, documents.starts, 1),
        )
        for name, verb, id_, places, beside in edges:
            if id_ is None:
                continue
            places = places[sizes > 1]
            places = places[documents.ids[places] == id_]
            near = documents.times_read[places + beside] > 0
            lost = near & (documents.times_read[places] == 0) & ~documents.after_row[places]
            if lost.sum() > max(2, 0.05 * near.sum()):
                number = documents.document_at(int(places[lost][0]))
                self.find(
                    f"no-{name}",
                    f"{share(int(lost.sum()), int(near.sum()))} of the documents do not {verb} with"
                    f" the token {self.text(np.array([id_]))}, as they do in the text given",
                    example=f"document {number}",
                    hint="keep the token between documents: without it one runs into the next",
                )

    def _doubled(
        self, documents: Lookup | None, found: Sequence[tuple[AuditRow, list[Overlap]]]
    ) -> None:
        """Two end or begin tokens where there should be one."""
        for name, id_ in (("eos", self.eos_id), ("bos", self.bos_id)):
            if id_ is None:
                continue
            double, single, example = 0, 0, ""
            for row, runs in found:
                here = row.ids == id_
                pairs = here[1:] & here[:-1]
                for run in runs if documents is not None else ():
                    # As the text itself has them.
                    pairs[run.at : run.at + run.length - 1] = False
                single += int(here.sum())
                double += int(pairs.sum())
                if pairs.any() and not example:
                    at = int(np.flatnonzero(pairs)[0])
                    example = (
                        f"{row.name}, token {at}: {self.text(row.ids[max(0, at - 6) : at + 8])}"
                    )
            if double > max(1, 0.02 * single):
                self.find(
                    f"double-{name}",
                    f"{count(double, 'time')} the token {self.text(np.array([id_]))} comes twice"
                    f" in a row ({single:,} in all)",
                    example=example,
                    hint="either the tokenizer or the loader adds it; leave one of them out",
                )

    def _from_text(
        self, documents: Lookup, found: Sequence[tuple[AuditRow, list[Overlap]]]
    ) -> None:
        """Special tokens that are parsed out of documents."""
        special = np.array(sorted(set(self.special.values())), np.int32)
        if not len(special):
            return
        times, example = 0, ""
        for row, runs in found:
            places: list[int] = []
            for one, two in itertools.pairwise(runs):
                # Between two parts of one document.
                end = one.place + one.length
                ends_at, goes_on = documents.document_at(end - 1), documents.document_at(two.place)
                gap = range(one.at + one.length, two.at)
                if gap and ends_at == goes_on and end <= two.place:
                    places += [at for at in gap if row.ids[at] in special]
            if documents.mask is None:
                edges = {self.eos_id, self.bos_id}
                for run in runs:
                    inside = np.isin(documents.ids[run.place : run.place + run.length], special)
                    places += [
                        run.at + int(at)
                        for at in np.flatnonzero(inside)
                        if int(row.ids[run.at + at]) not in edges
                    ]
            times += len(places)
            if places and not example:
                at = places[0]
                example = f"{row.name}, token {at}: {self.text(row.ids[max(0, at - 6) : at + 8])}"
        if times:
            self.find(
                "special-from-text",
                f"{count(times, 'special token')} came from the text of documents: a page that"
                " spells one ends or begins what it likes",
                example=example,
                hint="encode text with special tokens as text (tokenmill's default)",
            )

    def _prompts(
        self,
        documents: Lookup,
        found: Sequence[tuple[AuditRow, list[Overlap]]],
        labels: str | None,
    ) -> None:
        """Labels of what a mask leaves out, and answers without."""
        if documents.mask is None or labels is None:
            return
        wrong = right = wanted = missed = 0
        example = ""
        for row, runs in found:
            own = cast("Ids", row.labels) != IGNORED
            if row.counts is not None:
                own = own & row.counts
            learned = np.zeros(len(row.ids), bool)
            if labels == "same":
                learned[1:] = own[1:]
            else:
                learned[1:] = own[:-1]
            for run in runs:
                # What a row begins with has nothing before it to be foretold from.
                first = 1 if run.at == 0 else 0
                here = learned[run.at + first : run.at + run.length]
                answers = documents.mask[run.place + first : run.place + run.length]
                wrong += int((here & ~answers).sum())
                right += int((here & answers).sum())
                wanted += int(answers.sum())
                missed += int((answers & ~here).sum())
                if not example and (here & ~answers).sum() > 2:
                    at = run.at + first + int(np.flatnonzero(here & ~answers)[0])
                    example = f"{row.name}, token {at}: {self.text(row.ids[at : at + 12])}"
        if wrong > SOME * (wrong + right):
            self.find(
                "loss-on-prompts",
                f"{wrong + right:,} labels count for the loss where {wanted:,} tokens are answers:"
                f" {share(wrong, wrong + right)} of what is learned is prompts",
                example=example,
                hint=f"set the labels of prompts to {IGNORED}, or pass the mask of answers on",
            )
        if missed > 0.02 * wanted:
            self.find(
                "answers-not-learned",
                f"{share(missed, wanted)} of the tokens of answers have no label that counts",
                hint="see where the mask is cut off or shifted",
            )

    def boundaries(
        self, rows: Sequence[AuditRow], begins: Mapping[int, Bools], *, matters: bool
    ) -> None:
        """What batches say of where documents begin, beside where they do."""
        joined = silent = missing = extra = total = marked = still = 0
        masked = 0
        example = ""
        for row in rows:
            true = begins[id(row)]
            divided = row.is_divided
            masked += divided and row.has_attention
            if row.marks is not None and row.marks[1:].any() and row.restarts is not None:
                still += not row.restarts[1:].any()
            if not true.any():
                continue
            joined += 1
            if not divided:
                silent += 1
                continue
            said = np.zeros(len(true), bool)
            for each in (row.restarts, row.marks):
                if each is not None:
                    said |= each
            said[:1] = False
            total, marked = total + int(true.sum()), marked + int(said.sum())
            lost = true & ~said
            missing, extra = missing + int(lost.sum()), extra + int((said & ~true).sum())
            if lost.any() and not example:
                at = int(np.flatnonzero(lost)[0])
                example = f"{row.name}, token {at}: {self.text(row.ids[max(0, at - 6) : at + 6])}"
        hint = "give position_ids that begin again with each document, or cu_seqlens"
        if silent and (matters or missing):
            self.find(
                "attention-across-documents",
                f"{share(silent, joined)} of the rows that hold several documents do not say where"
                " they begin, so each sees those before it",
                hint=hint,
            )
        elif silent:
            self.remarks.append(
                f"attention goes across documents in {share(silent, len(rows))} of the rows:"
                " nothing in the batch says where they begin"
            )
        # Fewer may be where text repeats itself and a row is taken for another place of it.
        if missing > 0.05 * max(1, total):
            self.find(
                "boundaries",
                f"{share(missing, total)} of the documents begin where the batch does not say so",
                example=example,
                hint=hint,
            )
        if extra > 0.1 * max(1, marked):
            self.remarks.append(
                f"{share(extra, marked)} of the boundaries in batches are inside of documents"
            )
        if still:
            self.find(
                "positions",
                f"positions do not begin again with documents in {count(still, 'row')}, though the"
                " batch says where those begin",
                hint=hint,
            )
        if masked and self.asked.expected == "same":
            self.find(
                "attention-across-documents",
                f"{count(masked, 'row')} come with position_ids that begin again and an"
                " attention_mask: transformers then attends across documents",
                hint="leave attention_mask out, and set use_cache=False",
            )

    def store_itself(self) -> None:
        """What is wrong with the text that the loader reads."""
        store = self.store
        assert store is not None
        step = max(1, len(store) // LOOKED_AT)
        if store.manifest.sources:
            paths = {store.source(number).path for number in range(0, len(store), step)}
            self._files(paths)
        eos = store.manifest.identity.eos
        if eos is None or store.has_mask or self.tokenizer is None:
            return
        if ends_turns(find_tokenizer(self.tokenizer), eos.token):
            self.find(
                "end-of-turn",
                f"documents end in {eos.token!r}, which ends a turn of a chat in this tokenizer:"
                " after pretraining it means both",
                hint="build the store with the tokenizer's end of text: --eos '<|endoftext|>'",
            )

    def _files(self, paths: Iterable[str]) -> None:
        known = sorted(paths)
        stray = sorted(about_data({path: has_fields(path) for path in known}))
        if stray:
            self.find(
                "stray-files",
                f"{count(len(stray), 'file')} that are no data are trained on",
                example=", ".join(stray[:4]),
                hint="name the data files, or leave these out: --exclude",
            )
        names = [path for path in known if is_held_out(path.rpartition("/")[2])]
        if self.store is not None and self.store.split in ("train", None) and names:
            self.find(
                "held-out-files",
                f"{count(len(names), 'file')} that are named for validation or test are in the"
                f" split {self.store.split!r}",
                example=", ".join(names[:4]),
                hint="build with splits by file name, or name the training files alone",
            )


def is_read_anew(loader: Any) -> bool:
    """Whether reading it again is a second epoch; what has a state may just go on."""
    return iter(loader) is not loader and not hasattr(loader, "state_dict")


@with_options(AuditOptions)
def audit(asked: AuditOptions) -> AuditReport:
    """Read a loader's batches; say what is wrong with them.

    >>> tokenmill.audit(train_loader, store="store", model=model).findings
    """
    with contextlib.ExitStack() as resources:
        store = _open_store(asked, resources)
        run = Audit(asked, store)
        source = AuditedLoader(asked.loader)
        loader: Any = None
        if asked.ranks == 1:
            loader = source.make(rank=0, world_size=1, epoch=0, skip=0)
            readings = [read_batches(loader, batches=asked.batches, rank=0, pads=run.pads)]
        else:
            readings = read_ranks(source, asked, run.pads)
        rows = [row for reading in readings for row in reading.rows]
        if not rows:
            raise UsageError(
                f"{source.name} gave no batch, so there is nothing to look at",
                hint="see whether it was used up before: give a function that makes a new one",
            )
        is_whole = all(reading.is_whole for reading in readings)
        places = sum(len(row.ids) + row.padding for row in rows)
        run.padding(rows, places)
        labels = run.labels(rows)
        run.shifts(labels)
        if store is not None:
            run.lookup(rows, labels, is_whole)
            run.store_itself()
        else:
            run.unchecked.append(
                "tokens left out or repeated, ends of documents, loss on prompts, special tokens"
                " from text: the text was not given (--store STORE, or --text FILES -t TOKENIZER)"
            )
            run._doubled(None, [(row, []) for row in rows])
            run.boundaries(
                rows, {id(row): _after_ends(row, run.eos_id) for row in rows}, matters=False
            )
        run.ranks(readings)
        if asked.ranks == 1 or "rank" in source.takes:
            run.epochs(source, readings[0], loader)
            run.resume(source, readings[0])
        else:
            run.unchecked.append(
                "order of a second epoch, and resume: look at one rank (--ranks 1)"
            )
        return AuditReport(
            loader=source.name,
            ranks=len(readings),
            batches=sum(reading.batches for reading in readings),
            rows=len(rows),
            places=places,
            padding=sum(row.padding for row in rows),
            labels=labels,
            epoch_is_whole=is_whole,
            findings=tuple(run.findings),
            remarks=tuple(run.remarks),
            unchecked=tuple(run.unchecked),
        )


def _after_ends(row: AuditRow, eos_id: int | None) -> Bools:
    """Where documents begin, by the token before."""
    found = np.zeros(len(row.ids), bool)
    if eos_id is not None:
        found[1:] = row.ids[:-1] == eos_id
    return found


def _open_store(asked: AuditOptions, resources: contextlib.ExitStack) -> Store | None:
    if asked.store is not None:
        if isinstance(asked.store, Store):
            return asked.store
        return resources.enter_context(Store(asked.store, split=asked.split))
    if not asked.text:
        return None
    if asked.tokenizer is None:
        raise UsageError(
            "text without a tokenizer cannot be compared with ids",
            hint="name the tokenizer that the loader's ids are of: --tokenizer tokenizer.json",
        )
    folder = resources.enter_context(tempfile.TemporaryDirectory())
    info = describe(str(asked.tokenizer), policy=None)
    build(
        asked.text,
        tokenizer=asked.tokenizer,
        out=Path(folder) / "store",
        text_field=asked.text_field,
        separator=asked.separator,
        eos=info.eos_token is not None,
        on_progress=unheard,
    )
    return resources.enter_context(Store(Path(folder) / "store", split="train"))
