"""A recording replays bit for bit; one that is damaged is refused in a line."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from engines import Gate, endless, mixed_requests, sizes
from tiny import tiny_model

from jbatch.config import UserError
from jbatch.engine import Engine
from jbatch.recording import open_recording
from jbatch.replay import replay
from jbatch.request import Request, SamplingParams


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A recording with preemption, drawn tokens, prefix hits and a cancellation; its steps and its tokens."""
    path = tmp_path_factory.mktemp("recording") / "steps.jbatch"
    with Engine(tiny_model(), sizes(num_pages=60, page_size=2), record=path) as engine:
        engine.generate(mixed_requests(24))
        drawn = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
        engine.generate([Request((7, 8, 9, 10, 11), drawn)] * 4)
        gate = Gate()
        id_ = engine.submit(endless(60), gate)
        gate.wait()
        engine.cancel(id_)
        gate.open()
        gate.wait_for([id_])
        now = engine.snapshot()
        assert now.preemptions and now.prefix_hits
        engine.stop()
        now = engine.snapshot()
    return path, now.steps, now.output_tokens


def test_it_replays_bit_for_bit(recorded: tuple[Path, int, int]) -> None:
    path, steps, _ = recorded
    replayed = list(replay(tiny_model(), open_recording(path)))
    assert len(replayed) == steps
    assert all(step.same for step in replayed)


def test_a_difference_is_found(recorded: tuple[Path, int, int]) -> None:
    step = next(replay(tiny_model(), open_recording(recorded[0])))
    changed = step.recorded.copy()
    changed[-1] += 1
    assert not type(step)(step.bucket, step.outbox, changed).same


def test_only_its_owner_may_read_it(recorded: tuple[Path, int, int]) -> None:
    assert stat.S_IMODE(recorded[0].stat().st_mode) == 0o600


def test_it_is_cut_at_the_last_whole_frame(recorded: tuple[Path, int, int], tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(recorded[0].read_bytes()[:-5])
    assert len(list(replay(tiny_model(), open_recording(path)))) == recorded[1] - 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda data: b"", "no recording", id="empty"),
        pytest.param(lambda data: b"[1]\n" + data, "no recording", id="other json"),
        pytest.param(lambda data: data.replace(b"recording 3", b"recording 9", 1), "recording 9", id="other format"),
        pytest.param(lambda data: data.replace(b'"page_size": 2', b'"page_size": 3', 1), "power of two", id="sizes"),
        pytest.param(lambda data: data.replace(b"step", b"stop", 1), "damaged at byte", id="tag"),
        pytest.param(lambda data: data.replace(b"x\x01", b"x\x02", 1), "damaged", id="compression"),
        pytest.param(lambda data: data.replace(b'"max_slots": 24', b'"max_slots": 25', 1), "shape", id="shape"),
        pytest.param(lambda data: data.replace(b'"vocab_size": 320', b'"vocab_size": 321', 1), "tokens", id="model"),
    ],
)
def test_damage_is_one_line(damage: object, says: str, recorded: tuple[Path, int, int], tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(damage(recorded[0].read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=says) as error:
        list(replay(tiny_model(), open_recording(path)))
    assert "\n" not in str(error.value)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "here"
    path.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        Engine(tiny_model(), sizes(), record=path)
    assert path.read_text() == "mine"


def test_a_full_disk_does_not_stop_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines: list[str] = []

    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    with Engine(tiny_model(), sizes(), lines.append, record=tmp_path / "full") as engine:
        assert engine._recorder is not None and engine._recorder._file is not None
        engine._recorder._file.close()
        engine._recorder._file = Full()  # type: ignore[assignment]
        assert len(engine.generate([Request((1, 2), SamplingParams(max_tokens=3, ignore_eos=True))])[0].tokens) == 3
    assert sum("not complete (No space left on device)" in line for line in lines) == 1
