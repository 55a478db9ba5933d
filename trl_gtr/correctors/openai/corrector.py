"""A corrector for any server with OpenAI's chat-completions protocol."""

from __future__ import annotations

import base64
import io
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from ...responses.safe_text import one_line
from ...tasks.base import Task
from ...types import Correction, CorrectionRequest, Share, all_pictures
from ..audit import is_true
from ..base import BudgetExhausted, Corrector, failed
from ..questions import VERSION
from . import bounded_http
from .budget import Budget, CallSizes, Limits, picture_tokens, price_of
from .chat import MAX_NAME, ChatClient, KeyRejected
from .session import Session

logger = logging.getLogger(__name__)

WhenSpent = Literal["stop", "continue"]


class OpenAICorrector(Corrector):
    """Asks a vision-language model over HTTP: OpenAI, Azure, vLLM, SGLang, Ollama, llama.cpp, …

    Key and address come from the arguments or from the environment variables that the `openai` package reads
    (`OPENAI_API_KEY`, `OPENAI_BASE_URL`; with `azure=True` `AZURE_OPENAI_API_KEY`, `AZURE_OPENAI_ENDPOINT`,
    `OPENAI_API_VERSION`).

    Args:
        model: The model's name; on Azure, the deployment's.
        base_url: The server, e.g. `http://localhost:8000/v1`; on Azure, the resource's endpoint.
        temperature: Sampling temperature; 0.4 as in the paper.
        image_size: Longer side of the image in pixels; `None` sends it unchanged.
        image_detail: OpenAI's `detail` setting for images.
        max_completion_length: Maximum tokens per answer.
        max_tool_rounds: Replies that may call the task's tools before an answer is due.
        concurrency: Maximum concurrent corrections; the others wait.
        timeout: Seconds for one attempt.
        deadline: Seconds for one correction including retries, tool rounds and repair, counted from when it starts.
        max_retries: Retries after a timeout, a lost connection, 408, 409, 429 or 5xx.
        retry_delay: Seconds before the first retry, doubled for each further one, with jitter; longer if the server
            asks for it.
        max_calls: Budget for the whole run in HTTP calls; like the next two, split evenly over processes.
        max_tokens: Budget in prompt and answer tokens.
        max_usd: Budget in US dollars.
        prices: USD per million prompt tokens and per million answer tokens. Known for OpenAI's models
            (`budget.PRICES`).
        when_spent: `"stop"` ends the run with a checkpoint, `"continue"` continues without corrections; a corrector
            given here takes over.
        verify_with_truth: Discard answers that contradict the task's hidden truth. This makes any corrector an
            oracle, so results say nothing about the model.
    """

    def __init__(
        self,
        model: str = "gpt-4o",
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        azure: bool = False,
        api_version: str | None = None,
        temperature: float = 0.4,
        image_size: int | None = None,
        image_detail: Literal["auto", "low", "high"] = "auto",
        max_completion_length: int = 1024,
        max_tool_rounds: int = 3,
        concurrency: int = 32,
        timeout: float = 30.0,
        deadline: float = 90.0,
        max_retries: int = 4,
        retry_delay: float = 0.5,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_usd: float | None = None,
        prices: tuple[float, float] | None = None,
        when_spent: WhenSpent | Corrector = "stop",
        verify_with_truth: bool = False,
    ):
        prices = prices or price_of(model)
        _check_options(model, max_usd, prices, when_spent)
        self.model, self.azure, self.image_size, self.image_detail = model, azure, image_size, image_detail
        self.when_spent, self.verify_with_truth = when_spent, verify_with_truth
        self._fallback = when_spent if isinstance(when_spent, Corrector) else None
        self.budget = Budget(Limits(max_calls, max_tokens, max_usd).per_process(), prices)
        self._sizes = CallSizes(self.budget, max_completion_length, picture_tokens(model))
        self._counts: Counter[str] = Counter(retries=0, repairs=0, shared=0)
        self._spent = self._closed = False
        self._lock = threading.Lock()
        self._session: Session | None = None

        sampling: dict[str, Any] = {"model": model, "temperature": temperature}
        limits: dict[str, Any] = {"concurrency": concurrency, "deadline": deadline, "max_tool_rounds": max_tool_rounds}

        def new_session() -> Session:  # a closure, not attributes, to keep the key out of any repr
            client = _make_client(base_url, api_key, azure, api_version, timeout)
            chat = ChatClient(
                client, self._sizes, **sampling, timeout=timeout, max_retries=max_retries, delay=retry_delay
            )
            return Session(chat, self._counts, **limits)

        self._new_session: Callable[[], Session] = new_session
        chat = self._start().chat
        address = urlsplit(str(chat.client.base_url))
        self.server = address.netloc.rpartition("@")[2]  # without user name or key
        self.identity = (
            f"{model} at {self.server}{chat.redact(address.path)}, temperature {temperature}, "
            f"{max_completion_length} tokens, image size {image_size} {image_detail}, {max_tool_rounds} tool rounds, "
            f"questions v{VERSION}" + (", verified" if verify_with_truth else "")
        )

    def __repr__(self) -> str:
        return f"OpenAICorrector({self.identity})"

    # -- correcting ------------------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """The budget is spent and the run should stop: further calls raise `BudgetExhausted`."""
        return self._spent and (self.when_spent == "stop" or (self._fallback is not None and self._fallback.exhausted))

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        if self.exhausted:
            raise BudgetExhausted(f"the corrector's budget is spent: {self._spending()}")
        session = self._open()
        if session is None:
            corrections = [
                failed("cancelled", "the corrector was closed; call reopen() to continue") for _ in requests
            ]
        else:
            corrections = self._ask(session, requests)
        corrections = [self._finish(*pair) for pair in zip(requests, corrections, strict=True)]
        corrections = self._fall_back(requests, corrections)
        for correction in corrections:
            if not correction.fallback:
                self._count(correction)
        return corrections

    def _ask(self, session: Session, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        futures: list[Future[Correction]] = []
        try:
            for request in requests:
                # not in the event loop: encoding a PNG takes milliseconds
                parts = [self._image_part(image) for image in all_pictures(request.prompt, request.image)]
                futures.append(session.submit(request, parts))
            return [_result(future) for future in futures]
        except KeyRejected:
            raise ValueError(self._bad_key(401)) from None
        finally:
            for future in futures:
                future.cancel()  # no effect if done

    def _open(self) -> Session | None:
        """The session, recreated after a `reopen`; `None` while closed."""
        with self._lock:
            if self._session is None and not self._closed:
                self._session = self._new_session()
            return self._session

    def _image_part(self, image: np.ndarray) -> dict[str, Any]:
        url = data_url(image, self.image_size)
        return {"type": "image_url", "image_url": {"url": url, "detail": self.image_detail}}

    def _finish(self, request: CorrectionRequest, correction: Correction) -> Correction:
        """Set the answer's source, and check it against the truth if requested."""
        if self.verify_with_truth and correction.verdict != "failed" and is_true(correction, request) is False:
            reason = "the task's hidden truth contradicts the answer"
            correction = failed("untrue", reason, usage=correction.usage, latency=correction.latency)
        return replace(correction, source=self.identity)

    def _fall_back(self, requests: Sequence[CorrectionRequest], corrections: list[Correction]) -> list[Correction]:
        """Send requests that exceed the budget to the fallback, if there is one."""
        unpaid = [i for i, correction in enumerate(corrections) if correction.failure == "budget"]
        if not unpaid:
            return corrections
        with self._lock:
            first, self._spent = not self._spent, True
        if first:
            logger.warning("the corrector's budget is spent (%s); %s", self._spending(), self._after())
        if self._fallback is None:
            return corrections
        try:
            others = self._fallback.correct([requests[i] for i in unpaid])
        except BudgetExhausted:
            return corrections  # keep what was paid for; `exhausted` ends the run
        for i, other in zip(unpaid, others, strict=True):
            corrections[i] = replace(other, fallback=True)
        return corrections

    # -- keeping count ---------------------------------------------------------------------------------------------

    def _count(self, correction: Correction) -> None:
        kind = correction.failure
        if kind is None:
            return
        with self._lock:
            self._counts[f"failed_{kind}"] += 1
            first = self._counts[f"failed_{kind}"] == 1
        if first and kind not in ("budget", "cancelled", "late"):  # reported elsewhere
            why = correction.explanation
            logger.warning("a correction failed (%s); further failures of this kind will only be counted", why)

    def _after(self) -> str:
        if self._fallback is not None:
            return f"continuing with {self._fallback!r}"
        return "the run stops" if self.when_spent == "stop" else "continuing without corrections"

    def _spending(self) -> str:
        spent = self.budget.spent
        tokens = spent.prompt_tokens + spent.completion_tokens
        return f"{spent.calls} calls, {tokens} tokens, {spent.usd:.4f} USD"

    def metrics(self) -> dict[str, float]:
        """Totals for this process since the run began, including before a resume."""
        with self._lock:
            values = {f"corrector/{name}": float(count) for name, count in self._counts.items()}
        values |= self.budget.metrics()
        if self._fallback is not None:
            others = self._fallback.metrics()
            values |= {f"corrector/fallback_{name.removeprefix('corrector/')}": n for name, n in others.items()}
        if self.verify_with_truth:
            values["corrector/verified_with_truth"] = Share(1, 1)
        return values

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            state = {
                "spent": self.budget.state_dict(),
                "counts": dict(self._counts),
                "sizes": self._sizes.state_dict(),
                "spent_limits": asdict(self.budget.limits) if self._spent else None,
            }
        return state | {"fallback": self._fallback.state_dict() if self._fallback is not None else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            spent, counts = dict(state["spent"]), {name: int(count) for name, count in state["counts"].items()}
            with self._lock:
                self._sizes.load_state_dict(state.get("sizes") or {})
                self.budget.load_state_dict(spent)
                self._counts.clear()  # in place: the session adds to it
                self._counts.update(counts)
                # If the limits have changed there may be some budget left.
                self._spent = state.get("spent_limits") == asdict(self.budget.limits)
        except (LookupError, TypeError, ValueError, AttributeError):
            logger.warning("the checkpoint comes from a run with a different corrector; the budget is counted from 0")
            return
        if self._fallback is not None and state.get("fallback"):
            self._fallback.load_state_dict(state["fallback"])

    # -- start and end ---------------------------------------------------------------------------------------------

    def check(self, task: Task) -> None:
        """Fail early if the judge, server or key is missing or wrong. Only lists the server's models (free)."""
        if self.verify_with_truth:
            if not task.defines("judge"):
                raise ValueError(f"verify_with_truth needs a judge(), but task {task.name!r} has none")
            logger.warning("verify_with_truth is on: the hidden truth filters the corrector's answers")
        import openai

        if self._fallback is not None:
            self._fallback.check(task)
        try:
            known = self._start().list_models()
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise ValueError(self._bad_key(error.status_code)) from None
        except openai.APIStatusError as error:
            if 300 <= error.status_code < 400:
                raise ValueError(
                    f"{self.server} redirects to another address: set base_url to the final one"
                ) from None
            logger.info("%s lists no models (HTTP %s); continuing", self.server, error.status_code)
            return
        except (TimeoutError, openai.APIConnectionError):
            raise ValueError(f"no answer from {self.server}: is the server up and base_url right?") from None
        if known and not self.azure and self.model not in known:
            listed = ", ".join(one_line(name, MAX_NAME) for name in known[:10])
            logger.warning("%s doesn't list model %r; it lists %s", self.server, self.model, listed)

    def _bad_key(self, status: int) -> str:
        names = "AZURE_OPENAI_API_KEY" if self.azure else "OPENAI_API_KEY"
        return f"{self.server} rejects the key (HTTP {status}): set {names} or pass api_key=. Nothing was spent."

    def close(self) -> None:
        """Cancel pending corrections; they come back as failed. Nothing is sent until `reopen`, so that a thread about
        to ask doesn't reconnect after an interrupt."""
        with self._lock:
            session, self._session, self._closed = self._session, None, True
        if session is not None:
            session.close()
        if self._fallback is not None:
            self._fallback.close()

    def _start(self) -> Session:
        self.reopen()
        session = self._open()
        assert session is not None
        return session

    def reopen(self) -> None:
        """Accept requests again after `close`."""
        with self._lock:
            self._closed = False
        if self._fallback is not None:
            self._fallback.reopen()


def _result(future: Future[Correction]) -> Correction:
    try:
        return future.result()
    except CancelledError:  # never started, because the session was closed
        return failed("cancelled", "the run ended")


def _check_options(model: str, max_usd: float | None, prices: Any, when_spent: Any) -> None:
    if when_spent not in ("stop", "continue") and not isinstance(when_spent, Corrector):
        raise ValueError(f'when_spent must be "stop", "continue" or a corrector, not {when_spent!r}')
    if max_usd is not None and prices is None:
        raise ValueError(
            f"max_usd needs the price of {model!r}: pass prices=(usd per million prompt tokens, usd per million "
            "answer tokens), or (0, 0) for your own server"
        )


def data_url(image: np.ndarray, size: int | None = None) -> str:
    """Encode an image, uint8 (height, width, 3), as a PNG data URL, with a longer side of `size` pixels if given."""
    picture = Image.fromarray(image)
    if size is not None:
        scale = size / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)  # as small as the default for these images, and faster
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _make_client(
    base_url: str | None, api_key: str | None, azure: bool, api_version: str | None, timeout: float
) -> Any:
    try:
        import openai
    except ImportError:
        raise ImportError('OpenAICorrector needs the openai package: pip install "trl-gtr[openai]"') from None
    http_client = bounded_http.client(timeout, asynchronous=True)
    always: dict[str, Any] = {"max_retries": 0, "timeout": timeout, "http_client": http_client}
    try:
        if azure:
            options: dict[str, Any] = {"azure_endpoint": base_url} if base_url else {}
            return openai.AsyncAzureOpenAI(api_key=api_key, api_version=api_version, **options, **always)
        return openai.AsyncOpenAI(api_key=api_key, base_url=base_url, **always)
    except openai.OpenAIError as error:
        if base_url and not azure and "api_key" in str(error):
            # Self-hosted servers rarely need a key, but the client insists on one.
            return openai.AsyncOpenAI(api_key="none", base_url=base_url, **always)
        raise ValueError(f"could not create the openai client: {error}") from None
