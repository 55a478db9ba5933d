"""Answers kept on disk, so that the same step is never paid for twice and a run can be replayed.

One file an answer, named by its content: `<directory>/<corrector>/<two digits>/<digest>.json`. A file is written aside
and renamed, so that several processes can share a directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

from ..responses.safe_text import one_line, printable, storable
from ..storage.files import LONE_SURROGATE
from ..types import Cancellation, Correction, CorrectionRequest, FailureKind, Usage
from . import recorded_answers
from .base import BudgetExhausted, Corrector, CorrectorWrapper, failed, request_digest

logger = logging.getLogger(__name__)

OF_THE_RUN: tuple[FailureKind, ...] = ("budget", "cancelled", "late", "unavailable", "connection", "server")
"""Kinds of failures that say nothing of the step."""
MAX_ENTRY = 1 << 20
"""Bytes of a recorded answer; one is a few hundred."""


class CacheMiss(LookupError):
    """A replay asks for an answer that was never recorded."""


class AnswerStore:
    """The files of one corrector's answers."""

    def __init__(self, directory: str | os.PathLike[str], identity: str):
        readable = re.sub(r"[^A-Za-z0-9.-]+", "-", identity)[:40].strip("-.")
        self.folder = Path(directory) / f"{readable}-{hashlib.sha256(storable(identity).encode()).hexdigest()[:12]}"
        self.identity = identity
        self._damaged: set[str] = set()

    def get(self, digest: str, request: CorrectionRequest) -> Correction | None:
        """The answer to a request, checked like a new one; `None`, with one warning, where the file is damaged."""
        path = self._path(digest)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_ENTRY + 1)
            if len(data) > MAX_ENTRY:
                raise ValueError(f"it is longer than {MAX_ENTRY} bytes")
            return recorded_answers.read(json.loads(data), request)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            if digest not in self._damaged:
                logger.warning("%s is no recorded answer (%s); it is ignored", printable(path), one_line(error, 200))
            self._damaged.add(digest)
            return None

    def put(
        self, digest: str, correction: Correction, request: CorrectionRequest, *, replace_failed: bool = False
    ) -> Correction:
        """Keep an answer. If another process was faster its answer stays, and is returned: one step, one answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        named = self.folder / "identity.txt"
        if not named.exists():
            _write(named, storable(self.identity) + "\n")
        path = self._path(digest)
        path.parent.mkdir(exist_ok=True)
        text = _spelt(json.dumps(asdict(correction), ensure_ascii=False, indent=1, allow_nan=False))
        recorded_answers.read(json.loads(text), request)  # what could never be read again isn't kept
        there = path.exists()  # once: another process may write it meanwhile, and then its answer stays
        earlier = self.get(digest, request) if there else None
        if earlier is None or (replace_failed and earlier.verdict == "failed"):
            # In place of a damaged file too; of a new name the first one to write it is the owner.
            if _write(path, text, overwrite=there):
                return correction
            earlier = self.get(digest, request)
        return earlier or correction

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"


def recorded_identities(directory: str | os.PathLike[str]) -> list[str]:
    """Whose answers are in a cache."""
    named = Path(directory).glob("*/identity.txt")
    return sorted(path.read_text(encoding="utf-8", errors="replace").rstrip("\n") for path in named)


class CachedCorrector(CorrectorWrapper):
    """Asks another corrector only what nobody with the same cache has asked before.

    A rerun with the same seed makes no call and gets the same answers, failures included: a step whose answer timed
    out or was unusable is kept as failed, and asked again only with `retry_failed=True`. What failed for reasons of
    the run rather than of the step (budget, the end of the run or of a rollout, a server that was down) and what a
    fallback answered is never kept.
    """

    def __init__(self, corrector: Corrector, directory: str | os.PathLike[str], *, retry_failed: bool = False):
        super().__init__(corrector)
        self.store = AnswerStore(directory, self.identity)
        self.retry_failed = retry_failed
        # Only what is called off together is shared: a request must not fail with another rollout's.
        self._pending: dict[tuple[str, Cancellation], Future[Correction]] = {}
        self._lock = threading.Lock()
        self._hits = self._misses = 0
        self._warned = False

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        digests = [request_digest(request) for request in requests]
        known = {digest: self._recorded(digest, request) for digest, request in zip(digests, requests, strict=True)}
        mine: dict[str, CorrectionRequest] = {}
        shared: dict[str, Future[Correction]] = {}
        with self._lock:
            for digest, request in zip(digests, requests, strict=True):
                if known[digest] is not None or digest in shared:
                    continue
                key = digest, request.cancellation
                if key not in self._pending:
                    known[digest] = self._recorded(digest, request)  # another thread may just have finished with it
                    if known[digest] is not None:
                        continue
                    self._pending[key] = Future()
                    mine[digest] = request
                shared[digest] = self._pending[key]
            self._misses += len(mine)
            self._hits += len(requests) - len(mine)
        try:
            paid = self._ask(mine)
        except BudgetExhausted as spent:
            if len(mine) == len(known):
                raise
            paid = {digest: failed("budget", str(spent)) for digest in mine}  # what is known costs nothing
        answers = []
        for digest in digests:
            if digest in paid:
                answers.append(paid.pop(digest))  # the first of several identical requests shows the price
            else:
                answer = known[digest] or shared[digest].result()
                answers.append(replace(answer, usage=Usage(), latency=0.0))
        return answers

    def _recorded(self, digest: str, request: CorrectionRequest) -> Correction | None:
        answer = self.store.get(digest, request)
        return None if self.retry_failed and answer is not None and answer.verdict == "failed" else answer

    def _ask(self, requests: Mapping[str, CorrectionRequest]) -> dict[str, Correction]:
        """Ask what is new, keep it, and tell the other threads that wait for it."""
        if not requests:
            return {}
        answers: dict[str, Correction] = {}
        try:
            asked = self.corrector.correct(list(requests.values()))
            answers = dict(zip(requests, asked, strict=True))
            for digest, answer in answers.items():
                if answer.failure not in OF_THE_RUN and not answer.fallback:
                    answers[digest] = self._keep(digest, answer, requests[digest])
            return answers
        finally:
            # Also when asking raised: nobody may wait for ever.
            with self._lock:
                futures = {digest: self._pending.pop((digest, r.cancellation)) for digest, r in requests.items()}
            for digest, future in futures.items():
                future.set_result(answers.get(digest) or failed("cancelled", "the call that it was part of broke off"))

    def _keep(self, digest: str, answer: Correction, request: CorrectionRequest) -> Correction:
        """What is kept of an answer; a full disk or an odd answer costs the cache an answer and not the run."""
        try:
            return self.store.put(digest, answer, request, replace_failed=self.retry_failed)
        except (OSError, ValueError, TypeError) as error:
            if not self._warned:
                folder, why = printable(self.store.folder), one_line(error, 200)
                logger.warning("an answer can't be kept in %s (%s); going on without", folder, why)
            self._warned = True
            return answer

    def metrics(self) -> dict[str, float]:
        with self._lock:
            counts = {"corrector/cache_hits": float(self._hits), "corrector/cache_misses": float(self._misses)}
        return super().metrics() | counts


class RecordedCorrector(Corrector):
    """Replays a cache. What isn't in it raises `CacheMiss`: a replay that quietly trained on less would be no replay.

    Args:
        directory: Of a `CachedCorrector`.
        identity: Whose answers; may be left out if only one corrector's are there.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: str | None = None):
        recorded = recorded_identities(directory)
        if identity is None:
            if len(recorded) != 1:
                raise ValueError(f"choose identity= from the correctors recorded in {directory}: {recorded or 'none'}")
            identity = recorded[0]
        elif identity not in recorded:
            raise ValueError(f"{identity!r} is not recorded in {directory}; there are: {recorded or 'none'}")
        self.identity = identity
        self.store = AnswerStore(directory, identity)

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        return [self._replay(request_digest(request), request) for request in requests]

    def _replay(self, digest: str, request: CorrectionRequest) -> Correction:
        answer = self.store.get(digest, request)
        if answer is None:
            raise CacheMiss(
                f"no answer {digest[:12]}… is recorded in {self.store.folder}: seed, task, model or settings differ "
                "from the recorded run, or the file is damaged"
            )
        return replace(answer, usage=Usage(), latency=0.0)

    def __repr__(self) -> str:
        return f"RecordedCorrector({str(self.store.folder)!r})"


def _spelt(text: str) -> str:
    """JSON with half characters, which no file can hold, as escapes: they come back as they were."""
    return LONE_SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _put_if_absent(temporary: str, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links; of two processes at the same moment the last one wins
        if path.exists():
            raise FileExistsError(path) from None
        os.replace(temporary, path)


def _write(path: Path, text: str, *, overwrite: bool = False) -> bool:
    """Whole or not at all, whoever else writes the same file. `False` if it is there already and stays."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if overwrite:
            os.replace(temporary, path)
        else:
            _put_if_absent(temporary, path)
    except FileExistsError:
        return False
    finally:
        Path(temporary).unlink(missing_ok=True)
    return True
