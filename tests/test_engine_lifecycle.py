"""Every request ends exactly once and gives its pages back, whatever becomes of it or of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from engines import PATIENCE, Gate, Recorder, assert_pages_free, endless, make_engine, mixed_requests, serving, sizes
from tiny import EOS, TINY, tiny_model

from jbatch.config import EngineConfig, UserError
from jbatch.engine import Engine
from jbatch.programs import Programs
from jbatch.request import EngineStoppedError, Output, QueueFullError, Request, RequestError, SamplingParams

SMALL = sizes(max_running=2, max_slots=3, max_queue=4, max_admissions=2, num_pages=64)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Two run, one waits on the device, four on the host."""
    with serving(SMALL) as engine:
        yield engine
        engine.stop(drain=False)
        assert_pages_free(engine)


# ---- cancel ----


@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["held", "running", "waiting", "queued"])
def test_cancel_wherever_the_request_is(engine: Engine, victim: int) -> None:
    """From this thread, while the engine's own is held where the four stand as their names say."""
    gate, sink = Gate(1, 6), Recorder()
    ids = [engine.submit(endless(30), gate)]
    gate.wait()
    ids += [engine.submit(endless(30), sink) for _ in range(3)]
    gate.open()
    gate.wait()
    now = engine.snapshot()
    assert (now.running, now.waiting, now.queued) == (2, 1, 1)
    engine.cancel(ids[victim])
    heard = len((gate if victim == 0 else sink).outputs.get(ids[victim], []))
    gate.open()
    for place, id_ in enumerate(ids):
        where = gate if place == 0 else sink
        where.wait_for([id_])
        if place == victim:
            where.check(id_, "cancelled")
            assert where.outputs[id_][-1] == Output(id_, None, 0.0, "cancelled")
            assert len(where.outputs[id_]) <= heard + 3, "it may hear of this step, of one under way, and its end"
        else:
            where.check(id_, "length")
            assert len(where.outputs[id_]) == 30
    assert (heard > 0) == (victim < 2)


def test_cancel_twice_unknown_and_finished_requests(engine: Engine) -> None:
    sink = Recorder()
    id_ = engine.submit(endless(2), sink)
    sink.wait_for([id_])
    for which in (id_, id_, 10**6, -1):
        engine.cancel(which)
    again = engine.submit(endless(2), sink)
    engine.cancel(id_)
    sink.wait_for([again])
    sink.check(id_, "length")
    sink.check(again, "length")


def test_a_cancelled_request_makes_room(engine: Engine) -> None:
    """A request that wants all pages runs as soon as the one that held them is cancelled."""
    everything = SMALL.max_request_len
    gate, sink = Gate(), Recorder()
    first = engine.submit(endless(everything - 3), gate)
    gate.wait()
    second = engine.submit(endless(4, prompt=tuple([7] * (everything - 4))), sink)
    engine.cancel(first)
    gate.open()
    sink.wait_for([second])
    sink.check(second, "length")
    gate.check(first, "cancelled")


# ---- limits and checks ----


def test_a_full_queue_refuses_and_later_takes_again(engine: Engine) -> None:
    gate, sink = Gate(), Recorder()
    first = engine.submit(endless(3), gate)
    gate.wait()
    ids = [engine.submit(endless(3), sink) for _ in range(SMALL.max_queue)]
    with pytest.raises(QueueFullError) as refused:
        engine.submit(endless(3), sink)
    assert refused.value.retry_after >= 1
    gate.open()
    sink.wait_for(ids)
    ids.append(engine.submit(endless(3), sink))
    sink.wait_for(ids)
    gate.wait_for([first])
    for id_ in ids:
        sink.check(id_, "length")


def test_generate_waits_where_the_queue_is_full(engine: Engine) -> None:
    completions = engine.generate(endless(2) for _ in range(40))
    assert [len(completion.tokens) for completion in completions] == [2] * 40


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (Request((TINY.vocab_size,)), "prompt"),
        (Request((-1,)), "prompt"),
        (Request((1, 2, 2**40)), "prompt"),
        (Request((1,) * 192), "prompt"),
        (Request((1,) * 200), "prompt"),
        (Request((1,) * 180, SamplingParams(max_tokens=13)), "max_tokens"),
        (Request((1,), SamplingParams(max_tokens=2**31 - 1)), "max_tokens"),
        (Request((1,), SamplingParams(stop_token_ids=tuple(range(2, 10)))), "stop_token_ids"),
        (Request((1,), SamplingParams(stop_token_ids=(2**31,))), "stop_token_ids"),
        (Request((1,), SamplingParams(stop_token_ids=(-1,))), "stop_token_ids"),
    ],
)
def test_requests_the_engine_cannot_serve_are_refused(engine: Engine, request_: Request, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.submit(request_, Recorder())
    assert refused.value.param == param
    assert "\n" not in str(refused.value)
    assert len(engine.generate([endless(2)])[0].tokens) == 2, "the engine serves on"


@pytest.mark.parametrize(
    "request_",
    [
        Request((1,) * 180, SamplingParams(max_tokens=12, ignore_eos=True)),
        Request((2,), SamplingParams(stop_token_ids=tuple(range(2, 9)))),
        Request((2,), SamplingParams(stop_token_ids=tuple(range(2, 10)), ignore_eos=True)),
        Request((2,), SamplingParams(stop_token_ids=(EOS,) * 20)),
        Request((2,), SamplingParams(seed=-(2**70), temperature=1e6)),
        Request((2,), SamplingParams(seed=2**70, temperature=1e-300, top_p=1e-300, min_p=1e-300, top_k=2**31 - 1)),
        Request((2,), SamplingParams(temperature=1e6, top_k=3, top_p=0.5), priority=-(2**31) + 1),
        Request((2,), SamplingParams(min_p=1.0), priority=2**31 - 1),
    ],
)
def test_extreme_but_valid_requests_are_served(engine: Engine, request_: Request) -> None:
    (completion,) = engine.generate([request_])
    assert completion.finish_reason in ("stop", "length")
    assert all(0 <= token < TINY.vocab_size for token in completion.tokens)
    assert all(np.isfinite(completion.logprobs))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(fields: dict[str, float], param: str) -> None:
    with pytest.raises(RequestError, match=param) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_an_empty_prompt_and_a_priority_beyond_32_bits_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        Request(())
    for priority in (2**31, -(2**31)):
        with pytest.raises(RequestError, match="priority"):
            Request((1,), priority=priority)


# ---- stop ----


def test_a_draining_stop_finishes_everything(engine: Engine) -> None:
    gate, sink = Gate(), Recorder()
    ids = [engine.submit(endless(25), gate)]
    gate.wait()
    ids += [engine.submit(endless(25), sink) for _ in range(4)]
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    wait_until(lambda: not engine.accepting)
    with pytest.raises(EngineStoppedError):
        engine.submit(endless(), sink)
    gate.open()
    stopper.join(PATIENCE)
    assert not stopper.is_alive()
    for where, some in ((gate, ids[:1]), (sink, ids[1:])):
        for id_ in some:
            where.check(id_, "length")
            assert len(where.outputs[id_]) == 25
    assert_pages_free(engine)


def test_an_impatient_stop_cancels_everything(engine: Engine) -> None:
    gate, sink = Gate(), Recorder()
    first = engine.submit(endless(100), gate)
    gate.wait()
    ids = [engine.submit(endless(100), sink) for _ in range(4)]
    stopper = threading.Thread(target=engine.stop, kwargs={"drain": False})
    stopper.start()
    wait_until(lambda: not engine.accepting)
    gate.open()
    stopper.join(PATIENCE)
    gate.check(first, "cancelled")
    for id_ in ids:
        sink.check(id_, "cancelled")
    assert_pages_free(engine)


def test_an_impatient_stop_hurries_a_draining_one(engine: Engine) -> None:
    gate = Gate()
    id_ = engine.submit(endless(150), gate)
    gate.wait()
    drain = threading.Thread(target=engine.stop)
    drain.start()
    wait_until(lambda: not engine.accepting)
    hurry = threading.Thread(target=engine.stop, kwargs={"drain": False})
    hurry.start()
    wait_until(lambda: engine._dropping)
    gate.open()
    for thread in (drain, hurry):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    gate.check(id_, "cancelled")


def test_stop_is_harmless_before_the_start_and_twice() -> None:
    engine = make_engine(SMALL)
    assert not engine.accepting
    with pytest.raises(EngineStoppedError):
        engine.submit(endless(), Recorder())
    engine.stop()
    engine.stop(drain=False)


# ---- failure ----


def break_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every later step fail on the device."""

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory\nsecond line")

    choose = Programs.choose
    monkeypatch.setattr(Programs, "choose", lambda self, demand: (choose(self, demand)[0], broken))


def test_a_failing_step_ends_every_request_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with make_engine(SMALL, lines.append) as engine:
        gate, sink = Gate(), Recorder()
        first = engine.submit(endless(50), gate)
        gate.wait()
        ids = [engine.submit(endless(50), sink) for _ in range(4)]
        break_steps(monkeypatch)
        gate.open()
        sink.wait_for(ids)
        gate.wait_for([first])
        gate.check(first, "error")
        for id_ in ids:
            sink.check(id_, "error")
        wait_until(lambda: not engine.accepting)
        with pytest.raises(EngineStoppedError):
            engine.submit(endless(), sink)
        engine.cancel(first)
        assert lines[-1] == "failed: RuntimeError: out of memory"


def test_a_request_cancelled_as_the_step_fails_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancellation of a queued request is found in the same turn in which the dispatch fails."""
    with serving(SMALL) as engine:
        gate, sink = Gate(), Recorder()
        first = engine.submit(endless(50), gate)
        gate.wait()
        queued = [engine.submit(endless(50), sink) for _ in range(4)]
        for id_ in queued:
            engine.cancel(id_)
        break_steps(monkeypatch)
        gate.open()
        gate.wait_for([first])
        sink.wait_for(queued)
        for id_ in queued:
            sink.check(id_, "cancelled", "error")


# ---- everything at once ----


@pytest.mark.parametrize("overlap", [True, False])
def test_many_threads_submit_and_cancel(overlap: bool) -> None:
    """Each request ends once, hears nothing afterwards, and all pages come back."""
    config = sizes(num_pages=40, max_running=6, max_slots=8, max_queue=16, page_size=4, overlap=overlap)
    everyone: list[tuple[Recorder, list[int]]] = []
    with serving(config) as engine:
        threads = [threading.Thread(target=submit_and_cancel, args=(engine, i, everyone)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for sink, ids in everyone:
            sink.wait_for(ids)
        total = engine.snapshot()
        assert total.running == total.waiting == total.queued == 0
        engine.stop()
        assert_pages_free(engine)
    assert len(everyone) == 4 and total.preemptions > 0
    reasons = [reason for sink, ids in everyone for id_ in ids for reason in sink.reasons(id_)]
    assert {"cancelled", "length"} <= set(reasons) <= {"cancelled", "length", "stop"}
    for sink, ids in everyone:
        assert set(sink.outputs) == set(ids)
        for id_ in ids:
            sink.check(id_, "cancelled", "length", "stop")


def submit_and_cancel(engine: Engine, seed: int, everyone: list[tuple[Recorder, list[int]]]) -> None:
    rng = np.random.default_rng(seed)
    sink, ids = Recorder(), []
    for request in mixed_requests(150, seed):
        try:
            ids.append(engine.submit(Request(request.prompt, request.sampling, int(rng.integers(-1, 2))), sink))
        except QueueFullError:
            time.sleep(0.002)
        if ids and rng.random() < 0.4:
            engine.cancel(int(rng.choice(ids[-8:])))
        if rng.random() < 0.05:
            time.sleep(0.003)
    everyone.append((sink, ids))


def wait_until(condition: object) -> None:
    """Polls; fails after `PATIENCE`."""
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def test_a_model_that_knows_fewer_positions_lowers_the_longest_request() -> None:
    said: list[str] = []
    model = replace(tiny_model(), max_len=48)
    assert Engine(model, SMALL, said.append).config.max_model_len == 48
    assert len(said) == 1 and "48" in said[0]
    assert Engine(model, replace(SMALL, max_model_len=32), said.append).config.max_model_len == 32
    assert len(said) == 1


def test_a_sink_that_raises_costs_nobody_else_a_token() -> None:
    lines: list[str] = []
    with make_engine(SMALL, lines.append) as engine:
        good = Recorder()

        def bad(outputs: list[Output]) -> None:
            raise RuntimeError("a sink must not raise")

        engine.submit(endless(3), bad)
        id_ = engine.submit(endless(3), good)
        good.wait_for([id_])
        good.check(id_, "length")
        assert engine.accepting
    assert any("a sink must not raise" in line for line in lines)


def test_an_engine_runs_once() -> None:
    engine = make_engine(SMALL)
    engine.start()
    engine.stop()
    with pytest.raises(EngineStoppedError):
        engine.start()
    assert not engine.accepting


def test_generate_leaves_nothing_running_when_a_request_is_refused(engine: Engine) -> None:
    impossible = replace(endless(3), prompt=(TINY.vocab_size,))
    with pytest.raises(RequestError):
        engine.generate([endless(100), impossible])
    deadline = time.monotonic() + PATIENCE
    while engine.snapshot().pages_free != engine.snapshot().pages_total:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(seed=1.5)  # type: ignore[arg-type]


def test_there_must_be_room_for_a_prompt_and_its_answer() -> None:
    for wrong in ({"num_pages": 2, "page_size": 1, "chunk_size": 1}, {"max_model_len": 1}):
        with pytest.raises(UserError, match="room"):
            EngineConfig(**wrong)
