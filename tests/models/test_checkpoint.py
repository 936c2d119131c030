"""Converted models: restored instead of converted, remade when damaged or out of date."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jbatch.config import UserError
from jbatch.models import load
from jbatch.models.load import load_model


@pytest.fixture
def model(tiny, tmp_path):
    """A tiny model's GGUF file."""
    return tiny.write_gguf(tmp_path / "tiny.gguf")


def same(a, b) -> None:
    assert (a.name, a.config) == (b.name, b.config)
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    assert a.tokenizer.backend.to_str() == b.tokenizer.backend.to_str()
    for attribute in ("eos_ids", "bos_token", "eos_token", "chat_template"):
        assert getattr(a.tokenizer, attribute) == getattr(b.tokenizer, attribute)


def files_of(directory):
    """The directory's files that are not empty, in order."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_start_restores(cache, model, lines, monkeypatch, dtype):
    first = load_model(str(model), dtype=dtype, report=lines.append)
    monkeypatch.setattr(load, "read_gguf", None)
    second = load_model(str(model), dtype=dtype, report=lines.append)
    same(first, second)
    assert lines == [f"Converting tiny to {dtype} (once)"]
    assert {leaf.dtype for leaf in jax.tree.leaves(second.params)} == {jnp.dtype(dtype)}
    assert [leaf.sharding for leaf in jax.tree.leaves(first.params)] == [
        leaf.sharding for leaf in jax.tree.leaves(second.params)
    ]


def test_restore_onto_a_mesh(cache, model, lines):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for _ in range(2):
        loaded = load_model(str(model), report=lines.append, shardings=sharding)
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(loaded.params))


def test_changed_file_is_converted_again_and_the_old_one_removed(cache, model, lines):
    load_model(str(model), report=lines.append)
    os.utime(model, ns=(0, 0))
    load_model(str(model), report=lines.append)
    assert len(lines) == 2
    assert len(list((cache / "converted").iterdir())) == 1


def test_damaged_checkpoints_are_remade(cache, model, lines, capfd):
    good = load_model(str(model), report=lines.append)
    (directory,) = (cache / "converted").iterdir()
    for index in range(len(files_of(directory))):
        path = files_of(directory)[index]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        same(load_model(str(model), report=lines.append), good)
        files_of(directory)[index].unlink()
        same(load_model(str(model), report=lines.append), good)
    assert sum("is damaged" in line for line in lines) >= 20
    assert not any("\n" in line or "cannot be kept" in line for line in lines)
    assert [path.name for path in (cache / "converted").iterdir()] == [directory.name]
    assert not capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from Orbax's threads
@pytest.mark.parametrize("name", ["params/_CHECKPOINT_METADATA", "params/state/_METADATA", "config.json"])
def test_overwritten_checkpoint_is_remade(cache, model, lines, name):
    good = load_model(str(model), report=lines.append)
    (directory,) = (cache / "converted").iterdir()
    path = directory / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    same(load_model(str(model), report=lines.append), good)
    same(load_model(str(model), report=lines.append), good)


def test_one_changed_byte_in_the_weights_is_noticed(cache, model, lines):
    good = load_model(str(model), report=lines.append)
    (directory,) = (cache / "converted").iterdir()
    largest = max(files_of(directory), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    same(load_model(str(model), report=lines.append), good)
    assert "is damaged" in lines[-2]


def test_emptied_checkpoint_is_remade(cache, model, lines):
    good = load_model(str(model), report=lines.append)
    (directory,) = (cache / "converted").iterdir()
    shutil.rmtree(directory)
    directory.mkdir()
    same(load_model(str(model), report=lines.append), good)


def test_unwritable_cache_is_not_fatal(tmp_path, monkeypatch, model, lines):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JBATCH_CACHE", str(tmp_path / "file"))
    load_model(str(model), report=lines.append)
    assert "cannot be kept" in lines[-1] and "\n" not in lines[-1]


def test_full_disk_is_not_fatal(cache, model, lines, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    load_model(str(model), report=lines.append)
    assert "the disk is full" in lines[-1]
    assert not list((cache / "converted").iterdir())


def test_concurrent_first_starts(cache, model):
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_model(str(model), report=lines.append), range(4)))
    for other in loaded[1:]:
        same(loaded[0], other)
    assert set(lines) == {"Converting tiny to float32 (once)"}
    assert len(list((cache / "converted").iterdir())) == 1


def test_too_large_for_the_device(cache, model, lines, monkeypatch):
    def no_room(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", no_room)
        with pytest.raises(UserError, match=r"^[^\n]*RESOURCE_EXHAUSTED[^\n]*$"):
            load_model(str(model), report=lines.append)
    load_model(str(model), report=lines.append)
    monkeypatch.setattr(ocp, "load", no_room)
    with pytest.raises(UserError, match="smaller dtype"):
        load_model(str(model), report=lines.append)
