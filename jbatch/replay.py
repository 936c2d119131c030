"""Runs a recording again and compares: the same tokens and the same schedule, bit for bit.

  python -m jbatch.replay FILE [MODEL]

makes the recording's engine with the default model or the one given, feeds it every inbox the recorded engine was
given, and compares every outbox. Exit code 0 where all are equal, 1 where one differs.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro
from tqdm import tqdm

from jbatch.config import DEFAULT_MODEL, Bucket, UserError
from jbatch.core.inbox import inbox_size
from jbatch.core.model import Model
from jbatch.core.state import init_state
from jbatch.models.load import load_model
from jbatch.programs import Program
from jbatch.recording import Recording, open_recording
from jbatch.stepper import step_compiler


@dataclass(frozen=True)
class ReplayedStep:
    """A step of the recording, run again."""

    bucket: Bucket
    outbox: np.ndarray
    recorded: np.ndarray
    """The outbox that was recorded."""

    @property
    def same(self) -> bool:
        """Whether they are equal bit for bit."""
        return np.array_equal(self.outbox, self.recorded)


def replay(model: Model, recording: Recording) -> Iterator[ReplayedStep]:
    """Runs every step of a recording whose outbox was recorded too.

    Raises `UserError` where the model cannot have been the recorded one, or the recording is damaged.
    """
    config = recording.config
    if model.vocab_size != recording.vocab_size:
        raise UserError(
            f"the recording is of a model with {recording.vocab_size} tokens, this one has {model.vocab_size}: "
            "name the model that was served"
        )
    state = init_state(config, model.init_kv(config.num_pages, config.page_size))
    compile_step = step_compiler(model, state, config)
    programs: dict[Bucket, Program] = {}
    under_way: deque[tuple[Bucket, jax.Array]] = deque()
    for frame in recording.frames:
        if frame.kind == "step":
            bucket = Bucket(*frame.values[:2].tolist())
            if bucket not in config.buckets or len(frame.values) != 2 + inbox_size(config):
                raise UserError("the recording is damaged: a step has another shape than its engine's")
            if bucket not in programs:
                programs[bucket] = compile_step(bucket)
            state, outbox = programs[bucket](model.params, state, jax.device_put(frame.values[2:]))
            under_way.append((bucket, outbox))
        elif under_way:
            bucket, outbox = under_way.popleft()
            yield ReplayedStep(bucket, np.asarray(outbox), frame.values)


def main(file: tyro.conf.Positional[Path], model: tyro.conf.Positional[str] = DEFAULT_MODEL) -> int:
    """Replays FILE and says whether it went as recorded.

    Args:
      file: a recording, made with the server's --record.
      model: the model that was served: a name, a path or a hub id.
    """
    recording = open_recording(file)
    loaded = load_model(model, report=lambda line: print(line, file=sys.stderr))
    steps = 0
    for step in tqdm(replay(loaded.for_engine(), recording), desc="replay", unit="step"):
        if not step.same:
            print(f"step {steps} differs: {np.count_nonzero(step.outbox != step.recorded)} values")
            return 1
        steps += 1
    print(f"{steps} steps went as recorded, bit for bit")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(tyro.cli(main, prog="python -m jbatch.replay"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
