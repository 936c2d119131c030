"""The host loop: a thread that dispatches step k + 1 before it reads step k."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from jbatch.config import EngineConfig, UserError
from jbatch.controls import Controls
from jbatch.core.inbox import InboxBuilder
from jbatch.core.model import Model
from jbatch.core.state import MAX_STOP_TOKENS
from jbatch.forecast import retry_after, seconds_to_answer
from jbatch.ingress import Ingress, Ticket
from jbatch.prefix_guess import PrefixGuess
from jbatch.recording import Recorder
from jbatch.request import (
    INT32_MAX,
    Completion,
    DeadlineError,
    EngineStoppedError,
    FinishReason,
    Output,
    QueueFullError,
    Request,
    RequestError,
    Sink,
)
from jbatch.residents import Mail, Residents
from jbatch.stepper import Stepper
from jbatch.telemetry import Snapshot

IDLE_SECONDS = 0.005
"""Time between two steps that only see whether a batch may begin."""


class Engine:
    """Batches requests on one device. `start` it, `submit` from any thread, `stop` it; or use it in a `with`."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        report: Callable[[str], None] = lambda line: None,
        *,
        controls: Controls = Controls(),  # noqa: B008 (frozen)
        record: Path | None = None,
    ) -> None:
        """An engine that is not started yet.

        Args:
          report: takes a line for each phase of the start, and for a failure.
          controls: policy, batching, limits and targets to begin with.
          record: a file to be made, for `jbatch.replay`.

        Raises `UserError` where `record` exists or cannot be made, or the controls do not go with the sizes.
        """
        if config.max_model_len > model.max_len:
            report(f"load: max_model_len is {model.max_len}, since this model goes no further")
            config = replace(config, max_model_len=model.max_len)
        self.config = config
        self._model = model
        self._report = report
        self._ids = itertools.count(1)
        _check_controls(controls, config)
        self._lock = threading.Condition()  # guards the seven fields below
        self._ingress = Ingress(config.max_queue)
        self._controls = controls
        self._arrived = 0  # since the last inbox
        self._cancels: set[int] = set()
        self._accepting = False
        self._stopping = False
        self._dropping = False
        self._recorder = Recorder(record, config, model.vocab_size, report) if record else None
        self._stepper = Stepper(model, config, report, self._recorder)  # this and the next: the engine thread's own
        self._residents = Residents.empty(config.max_slots)
        self._guess = PrefixGuess(config.page_size, config.num_pages)
        self._secret = secrets.token_bytes(32)
        self._thread = threading.Thread(target=self._run, name="jbatch-engine", daemon=True)

    # ---- any thread ----

    def start(self) -> None:
        """Compiles the largest step and begins to serve. Smaller steps follow in the background.

        Raises `EngineStoppedError` where it was stopped before: an engine runs once.
        """
        if not self._stopping:
            self._stepper.programs.start()
        with self._lock:
            if self._stopping:
                raise EngineStoppedError("the engine was stopped: make a new one")
            self._accepting = True
            self._thread.start()

    def stop(self, *, drain: bool = True) -> None:
        """Takes no more requests, finishes those it has (or cancels them, without `drain`), and ends the threads."""
        with self._lock:
            self._accepting = False
            self._stopping = True
            self._dropping |= not drain
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._stepper.programs.stop()
        if self._recorder:
            self._recorder.close()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(drain=False)

    @property
    def accepting(self) -> bool:
        """Whether `submit` takes requests."""
        return self._accepting

    def warm_up(self) -> None:
        """Blocks until every bucket is compiled."""
        self._stepper.programs.wait()

    def submit(self, request: Request, sink: Sink) -> int:
        """Queues a request and returns its id; its outputs go to `sink`, the last with a finish reason.

        Raises `RequestError` where this engine cannot serve it, `QueueFullError` where too many wait, `DeadlineError`
        where the policy is "edf" and its deadline would be missed, and `EngineStoppedError` where the engine no longer
        accepts any.
        """
        self._check(request)
        with self._lock:
            if not self._accepting:
                raise EngineStoppedError("the engine is not running: it takes no more requests")
            id_ = next(self._ids)
            ticket = Ticket(id_, request, sink, time.monotonic())
            if request.deadline is not None and self._controls.policy == "edf":
                self._check_deadline(ticket, request.deadline)
            self._ingress.push(ticket, retry_after(self._stepper.telemetry, len(self._ingress)))
            self._arrived += 1
            self._lock.notify()
        return id_

    def cancel(self, request_id: int) -> None:
        """Ends a request within one step; its sink hears "cancelled". Does nothing once it has finished."""
        with self._lock:
            self._cancels.add(request_id)
            self._lock.notify()

    @property
    def controls(self) -> Controls:
        """Policy, batching, limits and targets in force."""
        return self._controls

    def set_controls(self, controls: Controls) -> None:
        """Puts other controls in force from the next step on. Raises `UserError` where they do not fit the sizes."""
        _check_controls(controls, self.config)
        with self._lock:
            self._controls = controls

    def snapshot(self) -> Snapshot:
        """The state of the engine as of the last step read."""
        with self._lock:
            queued = len(self._ingress)
        return replace(self._stepper.telemetry, queued=queued, buckets=self._stepper.programs.buckets)

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Submits the requests, waits for all, and returns their completions in order."""
        inbox: SimpleQueue[list[Output]] = SimpleQueue()
        outputs: dict[int, list[Output]] = {}

        def receive() -> int:
            news = inbox.get()
            for output in news:
                outputs.setdefault(output.request_id, []).append(output)
            return sum(output.finish_reason is not None for output in news)

        ids: list[int] = []
        finished = 0
        sink = inbox.put
        try:
            for request in requests:
                while True:
                    try:
                        ids.append(self.submit(request, sink))
                        break
                    except QueueFullError:
                        if finished == len(ids):  # the queue is full of others' requests
                            raise
                        finished += receive()
        except Exception:  # whatever it is, nobody will hear those that were taken
            for id_ in ids:
                self.cancel(id_)
            raise
        while finished < len(ids):
            finished += receive()
        return [_completion(outputs[id_]) for id_ in ids]

    # ---- checks ----

    def _check(self, request: Request) -> None:
        sampling, length = request.sampling, len(request.prompt)
        most = self.config.max_request_len
        if length + sampling.max_tokens > most:
            raise RequestError(
                f"the prompt has {length} tokens and max_tokens is {sampling.max_tokens}: "
                f"together they may be at most {most}",
                "max_tokens" if length < most else "prompt",
            )
        for name, tokens in (("prompt", request.prompt), ("stop_token_ids", sampling.stop_token_ids)):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._model.vocab_size):
                raise RequestError(f"{name} has token ids outside 0 .. {self._model.vocab_size - 1}", name)
        if len(self._stop_tokens(request)) > MAX_STOP_TOKENS:
            raise RequestError(f"more than {MAX_STOP_TOKENS} stop tokens, the model's own included", "stop_token_ids")

    def _stop_tokens(self, request: Request) -> tuple[int, ...]:
        own = () if request.sampling.ignore_eos else self._model.eos_ids
        return tuple({*own, *request.sampling.stop_token_ids})

    def _check_deadline(self, ticket: Ticket, deadline: float) -> None:
        past = self._stepper.telemetry
        ahead = past.waiting + sum(other.due <= ticket.due for other in self._ingress.tickets())
        seconds = seconds_to_answer(ticket.request, ahead, past, self.config)
        if seconds > deadline:
            raise DeadlineError(deadline, seconds)

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            self._fail(error)

    def _turn(self) -> bool:
        """Dispatches a step if there is work, then reads the one before it; False once stopped and idle."""
        mail = Mail()
        try:
            inbox = self._collect(mail)
            if inbox is not None:
                self._stepper.dispatch(inbox)
        finally:  # a request cancelled in the queue hears so even where the step fails
            mail.deliver(self._report)
        behind = 1 if inbox is not None and self.config.overlap else 0
        while self._stepper.in_flight > behind:
            outbox, given = self._stepper.read()
            mail = Mail()
            self._residents.settle(outbox, given.cancelled, mail)
            mail.deliver(self._report)
        return not self._stopped()

    def _collect(self, mail: Mail) -> InboxBuilder | None:
        """Waits for work; fills an inbox, or returns None where no step is needed."""
        with self._lock:
            while not (self._residents or self._ingress or self._cancels or self._stopping):
                self._lock.wait()
            if self._stepper.idle and not (self._ingress or self._cancels or self._stopping):
                self._lock.wait(IDLE_SECONDS)
            if self._dropping:
                self._cancels.update(self._residents.slots, (ticket.id for ticket in self._ingress.tickets()))
            cancels, self._cancels = self._cancels, set()
            for id_ in cancels:
                if ticket := self._ingress.remove(id_):
                    mail.add(ticket, None, 0.0, "cancelled")
            controls, now = self._controls, time.monotonic()
            places = min(len(self._residents.free), self.config.max_admissions)
            entering = self._ingress.take(places, controls, now, self._residents.tenants.live)
            measured = self._stepper.measured._replace(queued=len(self._ingress), arrived=self._arrived)
            inbox = InboxBuilder(self.config, controls, now, measured)
            for id_ in cancels:
                if (slot := self._residents.slots.get(id_)) is not None:
                    inbox.cancel(slot, id_)
            for ticket in entering:
                self._admit(ticket, inbox)
            if not self._residents or (inbox.empty and self._stepper.surely_ends(self._residents.tokens_left())):
                return None
            self._arrived = 0
        return inbox

    def _admit(self, ticket: Ticket, inbox: InboxBuilder) -> None:
        request = ticket.request
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(31)
        salt = self._salt(request)
        placement = replace(
            self._residents.place(ticket),
            seed=seed & INT32_MAX,
            stop_tokens=self._stop_tokens(request),
            salt=salt,
        )
        if self.config.prefix_caching:
            cached = self._guess.cached_tokens(request.prompt, salt)
            placement = replace(placement, pin=request.pin_seconds, cached=cached)
        inbox.admit(request, placement)

    def _salt(self, request: Request) -> bytes:
        """Eight bytes that nobody can foresee; a new one each time keeps a request from sharing anything."""
        if not self.config.prefix_caching:
            return secrets.token_bytes(8)
        tenant, salt = request.tenant.encode(), request.cache_salt.encode()
        owner = len(tenant).to_bytes(8) + tenant + salt
        return hashlib.blake2b(owner, key=self._secret, digest_size=8).digest()

    def _stopped(self) -> bool:
        with self._lock:
            return self._stopping and not self._ingress and not self._residents

    def _fail(self, error: Exception) -> None:
        """Ends every request, so that nobody waits for ever, and takes no more."""
        self._report(f"failed: {type(error).__name__}: {error}".splitlines()[0])
        mail = Mail()
        with self._lock:
            self._accepting = False
            for ticket in self._ingress.clear():
                mail.add(ticket, None, 0.0, "error")
        self._residents.end_all("error", mail)
        mail.deliver(self._report)


def _check_controls(controls: Controls, config: EngineConfig) -> None:
    if controls.running_limit > config.max_running:
        raise UserError(
            f"running_limit is {controls.running_limit}: it must be at most max_running, {config.max_running}, or 0"
        )


def _completion(outputs: list[Output]) -> Completion:
    tokens = [output for output in outputs if output.token is not None]
    reason: FinishReason | None = outputs[-1].finish_reason
    assert reason is not None
    return Completion(
        tokens=tuple(output.token for output in tokens if output.token is not None),
        logprobs=tuple(output.logprob for output in tokens),
        finish_reason=reason,
    )
