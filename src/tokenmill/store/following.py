"""A store that is read while it is built, on this machine or on others.

    building.json (which units there will be, in order)  +  receipts, as they come
        -> a Store of the units that are there without a gap, again and again a longer one

A build writes `building.json` before its first unit, and removes it after the manifest. A receipt
is complete when it is seen, so a reader needs no word of the build but these files: it takes the
next unit of the plan as soon as it has its receipt, whatever else was built before it. What it has
seen never changes; where it would (another command, other input), that is an error and not a guess.
"""

from __future__ import annotations

import shlex
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from tokenmill import files
from tokenmill.errors import BuildError, StoreError, TokenmillError, UsageError
from tokenmill.files import local_path
from tokenmill.store.facts import Building, Manifest, ManifestAssembler, Receipt, facts_of
from tokenmill.store.layout import TRAIN, StoreLayout, is_locked, store_errors
from tokenmill.store.reader import Store, open_files
from tokenmill.words import count, share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tokenmill.files import PathInput

# -------------------------------------------------------------------------------------------------
# The reader's side.

POLL_SECONDS = 0.05
REMOTE_POLL_SECONDS = 2.0
START_SECONDS = 60.0  # for a build to begin that was started beside its reader
PATIENCE_SECONDS = 15.0  # without a process that builds: it may be started again
# The same where nobody can know: parts on many machines, a bucket.
LONG_PATIENCE_SECONDS = 1800.0
_AT_ONCE = 32  # receipts that a bucket is asked for


class _Place(NamedTuple):
    """The next unit: its source in the plan, and its number there."""

    source: int
    unit: int
    is_new: bool = False  # the source before was a stream, and has just ended


class Follower:
    """Follows a build: `store` is what it has committed so far, in the order of its plan.

    >>> follower = Follower("store", split="train")
    >>> follower.wait_for(lambda store: store.num_tokens > 1_000_000)
    >>> follower.store, follower.is_finished
    """

    def __init__(
        self,
        path: PathInput,
        *,
        split: str | None = "train",
        cache: PathInput | None = None,
        cache_bytes: int | None = None,
        on_wait: Callable[[bool], None] | None = None,
        require_builder: Callable[[], None] | None = None,
    ) -> None:
        """Waits for the first tokens of the split. `on_wait` is told when waiting begins and ends.

        A store that is finished already is one that has nothing more to come. `require_builder`
        raises the error of a build of which the caller knows that it has ended.
        """
        self.path, self.split = path, split
        self._require = require_builder or (lambda: None)
        self._cache, self._cache_bytes = cache, cache_bytes
        root = local_path(path)
        if root is not None and root.is_file():
            raise UsageError(
                f"{str(root)!r} is a file, such as a view, and what is followed is a store that is"
                " built",
                hint="follow the store itself; a view has what its store held when it was made, so"
                " leave out follow=True",
            )
        self._layout = None if root is None else StoreLayout(root.absolute())
        self.name = files.shown(str(path)) if root is None else str(root)
        self.on_wait = on_wait
        self.is_finished = False
        # In waits that have ended; and since when it is waited now. One value: threads read it.
        self._waits: tuple[float, float | None] = (0.0, None)
        self._ends_waiting = threading.Event()
        self.lock = threading.RLock()  # what is taken of the build is taken by one thread
        self._building: Building | None = None
        self._seen = b""  # of building.json
        self._place = _Place(0, 0)
        self._heard = time.monotonic()  # of the build, the last time
        self.store: Store | None = None
        self.wait_for(lambda store: store.num_tokens > 0)

    @property
    def current(self) -> Store:
        """What is there now; at least one unit with tokens, once it was waited for."""
        assert self.store is not None
        return self.store

    @property
    def is_waiting(self) -> bool:
        """Whether some thread waits for the build now."""
        return self._waits[1] is not None

    @property
    def waited_seconds(self) -> float:
        """How long was waited for the build so far, a wait that goes on included."""
        waited, since = self._waits
        return waited if since is None else waited + time.monotonic() - since

    def end_waiting(self) -> None:
        """Have `wait_for` return, now and from now on; may be called by a handler of signals."""
        self._ends_waiting.set()

    def describe(self) -> str:
        """How far the build has come, in the order of its plan: '37.2% built'."""
        building, (source, unit, _) = self._building, self._place
        if building is None or self.is_finished:
            return "all of it built"
        sources = building.sources
        done = float(sum(each.size for each in sources[:source]))
        if source < len(sources) and (units := sources[source].units):
            done += sources[source].size * unit / units
        elif unit:  # nobody knows how many there will be
            return f"{count(len(self._units.units), 'unit')} built"
        return f"{share(int(done), sum(each.size for each in sources))} built"

    def wait_for(
        self, is_enough: Callable[[Store], bool], *, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until the store has what is needed, or is finished; False if it was ended before.

        BuildError says why there will not be more.
        """
        is_waiting = False
        poll = REMOTE_POLL_SECONDS if self._layout is None else POLL_SECONDS
        try:
            while True:
                while self.advance():
                    if self.store is not None and is_enough(self.store):
                        return True
                if self.is_finished or (self.store is not None and is_enough(self.store)):
                    return True
                if self._ends_waiting.is_set() or stopped():
                    return False
                if not is_waiting:
                    is_waiting = True
                    self._waits = self._waits[0], time.monotonic()
                    self._tell(is_waiting)
                self._require_builder()
                self._ends_waiting.wait(poll)
        finally:
            if is_waiting:
                self._waits = self.waited_seconds, None
                self._tell(False)

    def _tell(self, is_waiting: bool) -> None:
        if self.on_wait is not None:
            self.on_wait(is_waiting)

    def advance(self) -> bool:
        """Take what has come since; True if there was anything."""
        with self.lock:
            if self.is_finished:
                return False
            if self._building is not None and self._take_units():
                self._heard = time.monotonic()
                self.store = self._open(self._units.manifest())
                return True
            return self._look_again()

    # The units.

    def _take_units(self) -> int:
        """Add the units that are there now, up to the first that is not; how many they were."""
        taken = 0
        while names := self._coming():
            for name, data in zip(names, self._read(names), strict=False):
                if self._place.is_new and name != names[0]:
                    break  # a stream has ended: what was asked for after it does not exist
                if data is None or not self._take(name, data):
                    return taken
                taken += 1
        return taken

    def _coming(self) -> list[str]:
        """Receipts of the next units, as far as it is known which those are."""
        assert self._building is not None
        names: list[str] = []
        source, unit, _ = self._place
        for planned in self._building.sources[source:]:
            last = unit + _AT_ONCE if planned.units is None else planned.units
            numbers = range(unit, last)
            names += [f"shards/{planned.prefix}-{k:05d}.json" for k in numbers[:_AT_ONCE]]
            if planned.units is None or len(names) >= _AT_ONCE:
                break
            unit = 0
        return names[:_AT_ONCE]

    def _take(self, name: str, data: bytes) -> bool:
        """Add the next unit; False where its receipt is of an earlier build, and is replaced."""
        assert self._building is not None
        sources = self._building.sources
        source, unit, _ = self._place
        while sources[source].units == 0:
            source += 1
        planned = sources[source]
        receipt = Receipt.from_bytes(data, path=f"{self.name}/{name}")
        made_of = receipt.config, receipt.source.size, receipt.source.version
        if made_of != (self._building.identity.fingerprint, planned.size, planned.version):
            return False
        self._units.add(receipt, file=facts_of(data))
        is_last = receipt.source.is_last if planned.units is None else unit + 1 == planned.units
        is_stream = planned.units is None
        self._place = _Place(source + 1, 0, is_stream) if is_last else _Place(source, unit + 1)
        return True

    # The plan, and the end of it.

    def _look_again(self) -> bool:
        """At the plan, which may be new or gone: True if the store is finished."""
        data = next(self._read(["building.json"]))
        if data is None:
            return self._finish()
        if data != self._seen:
            building = Building.from_bytes(data, path=f"{self.name}/building.json")
            if self._building is None:
                self._choose_split(building)
                self._units = ManifestAssembler(building.identity)
            else:
                self._require_same(building)
            self._building, self._seen = building, data
            self._heard = time.monotonic()
        return False

    def _require_same(self, new: Building) -> None:
        """StoreError where a build that was started again makes other units of what was read."""
        assert self._building is not None
        old, source = self._building, self._place.source
        began = source + (self._place.unit > 0)
        if new.identity.fingerprint != old.identity.fingerprint:
            raise self._other("with another tokenizer or other options")
        # Whatever is planned of a file that was read in part goes on where it was read to.
        was, now = (
            [(each.path, each.size, each.version) for each in building.sources[:began]]
            for building in (old, new)
        )
        counts = ([each.units for each in building.sources[:source]] for building in (old, new))
        if was != now or len({tuple(each) for each in counts}) > 1:
            raise self._other("of other input")

    def _finish(self) -> bool:
        """Whether there is a manifest: then the store is finished, and as it was read so far."""
        manifest = self._manifest()
        if manifest is None:
            return False
        if self._building is not None:
            if manifest.identity.fingerprint != self._building.identity.fingerprint:
                raise self._other("with another tokenizer or other options")
            read = self._units.units
            now = manifest.units[: len(read)]
            if [(each.name, each.shards) for each in read] != [
                (each.name, each.shards) for each in now
            ]:
                raise self._other("of other input")
        elif self.split is None and len(manifest.splits) > 1:
            raise self._no_split()
        if self.split is None:
            self.split = next(iter(manifest.splits), None)
        cache, cache_bytes = self._cache, self._cache_bytes
        self.store = Store(self.path, split=self.split, cache=cache, cache_bytes=cache_bytes)
        self.is_finished = True
        return True

    def _choose_split(self, building: Building) -> None:
        """The only one that there will be, where none was said."""
        config = building.identity.config
        if self.split is None and (config.get("val_fraction") or config.get("split_by_name")):
            raise self._no_split()
        self.split = self.split or TRAIN

    def _no_split(self) -> UsageError:
        return UsageError(
            f"{self.name!r} has several splits, and none was asked for; all of them together would"
            " train on what is held out",
            hint='say which: split="train"',
        )

    def _manifest(self) -> Manifest | None:
        data = next(self._read(["tokenmill.json"]))
        if data is None:
            return None
        return Manifest.from_bytes(data, path=f"{self.name}/tokenmill.json")

    def _other(self, how: str) -> StoreError:
        return StoreError(
            f"{self.name!r} was built anew, {how}, while it was read: what comes next would not"
            " follow from what was read so far",
            hint="begin to read it again; a run goes on from a store of the same input and options",
        )

    def _require_builder(self) -> None:
        """BuildError where nobody builds any more, and all is taken that was committed."""
        try:
            self._look_for_builder()
        except TokenmillError:
            if not self.advance():
                raise

    def _look_for_builder(self) -> None:
        self._require()
        again = "run the build again with the same command: it resumes, and then so can its reader"
        building, layout = self._building, self._layout
        if building is not None and building.failed is not None:
            raise BuildError(f"the build of {self.name!r} failed: {building.failed}", hint=again)
        is_built = None if layout is None else is_locked(layout)
        if is_built:
            self._heard = time.monotonic()
        patience = LONG_PATIENCE_SECONDS
        if building is None:
            patience = START_SECONDS
        elif is_built is not None and layout is not None and not layout.parts.is_dir():
            patience = PATIENCE_SECONDS
        if time.monotonic() - self._heard < patience:
            return
        if building is None:
            raise StoreError(
                f"there is no store at {self.name!r}, and no build of one has begun for"
                f" {patience:.0f} seconds",
                hint="check the path; start it with: tokenmill build INPUT --tokenizer TOKENIZER"
                f" --out {shlex.quote(self.name)}",
            )
        raise BuildError(
            f"nothing has come of the build of {self.name!r} for {patience:.0f} seconds, and it is"
            " not finished: it was ended, or lost",
            hint=again,
        )

    # Files.

    def _read(self, names: Iterable[str]) -> Iterator[bytes | None]:
        """Small files of the store; None for one that is not there."""
        if self._layout is not None:
            for name in names:
                yield _read_file(f"{self._layout.root}/{name}")
            return
        with store_errors():
            yield from files.read_many([files.join(str(self.path), name) for name in names])

    def _open(self, manifest: Manifest) -> Store | None:
        """A store of what is there; None where none of it is of the split."""
        if self.split not in manifest.splits:
            return None
        found = open_files(self.path, cache=self._cache, cache_bytes=self._cache_bytes)
        found.take_manifest(manifest)
        return Store.of_files(found, split=self.split, manifest=manifest)


def _read_file(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"{path!r} cannot be read: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error
