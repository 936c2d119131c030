"""Recordings: every inbox a device was given and every outbox it gave back. Imports no jax.

A file is a line of JSON (format, engine sizes, vocabulary) and then frames: a tag of four bytes, a length, and that
many bytes of zlib-compressed int32. It holds prompts and answers as token ids: only its owner may read it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from jbatch.config import Bucket, EngineConfig, UserError

FORMAT = "jbatch recording 3"
_FRAME = struct.Struct("<4sI")
_MOST_BYTES = 1 << 28


class Recorder:
    """Writes a recording, for one thread. Once the file cannot be written it says so and goes on without."""

    def __init__(self, path: Path, config: EngineConfig, vocab_size: int, report: Callable[[str], None]) -> None:
        """Raises `UserError` where `path` exists or cannot be made."""
        self._path = path
        self._report = report
        head = {"format": FORMAT, "vocab_size": vocab_size, "config": asdict(config)}
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file: BinaryIO | None = os.fdopen(descriptor, "wb")
            self._file.write(json.dumps(head).encode() + b"\n")
        except FileExistsError:
            raise UserError(f"the recording {path} exists already: name another file, or remove it") from None
        except OSError as error:
            raise UserError(f"the recording {path} cannot be made ({error.strerror}): name another file") from None

    def dispatched(self, bucket: Bucket, inbox: np.ndarray) -> None:
        """A step was sent to the device."""
        self._write(b"step", np.concatenate([np.array(bucket, np.int32), inbox]))

    def read(self, outbox: np.ndarray) -> None:
        """The oldest step under way was read."""
        self._write(b"read", outbox)

    def close(self) -> None:
        """Ends the recording."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._lost(error)

    def _write(self, tag: bytes, values: np.ndarray) -> None:
        if self._file is None:
            return
        data = zlib.compress(np.ascontiguousarray(values, np.int32).tobytes(), 1)
        try:
            self._file.write(_FRAME.pack(tag, len(data)) + data)
        except OSError as error:
            self.close()
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        self._report(f"record: {self._path} is not complete ({error.strerror}), serving goes on")


@dataclass(frozen=True)
class Frame:
    """One event of a recording."""

    kind: Literal["step", "read"]
    values: np.ndarray  # int32: bucket and inbox, or outbox


@dataclass(frozen=True)
class Recording:
    """A recording's head, and its frames in order of time."""

    config: EngineConfig
    vocab_size: int
    frames: Iterator[Frame]


def open_recording(path: Path) -> Recording:
    """Reads the head of a recording; the frames follow as they are asked for, up to the last whole one.

    Raises `UserError`, here or from the frames, where the file is no recording or is damaged.
    """
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(1 << 16))
            begin = file.tell()
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}")
        return Recording(EngineConfig(**head["config"]), int(head["vocab_size"]), _frames(path, begin))
    except OSError as error:
        raise UserError(f"cannot read the recording {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no recording that this version of jbatch can read ({error})") from None


def _frames(path: Path, begin: int) -> Iterator[Frame]:
    with path.open("rb") as file:
        file.seek(begin)
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            tag, length = _FRAME.unpack(head)
            if tag not in (b"step", b"read") or length > _MOST_BYTES:
                raise UserError(f"the recording {path} is damaged at byte {file.tell() - _FRAME.size}")
            data = file.read(length)
            if len(data) < length:
                return  # the process that wrote it was killed
            yield Frame("step" if tag == b"step" else "read", _unpack(path, data))


def _unpack(path: Path, data: bytes) -> np.ndarray:
    try:
        raw = zlib.decompressobj().decompress(data, _MOST_BYTES)
        return np.frombuffer(raw, np.int32)
    except (zlib.error, ValueError) as error:
        raise UserError(f"the recording {path} is damaged ({error})") from None
