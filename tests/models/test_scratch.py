"""Directories for what is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from jbatch.models.scratch import scratch


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    parent = tmp_path / "models"
    with scratch(parent) as mine:
        (mine / "file").write_text("x")
    assert list(parent.iterdir()) == []
    for name in (".new-old", ".new-young", "old"):
        (parent / name).mkdir()
        (parent / name / "file").write_text("x")
    os.utime(parent / ".new-old", (0, 0))
    os.utime(parent / "old", (0, 0))
    with scratch(parent):
        assert not (parent / ".new-old").exists()
    assert sorted(path.name for path in parent.iterdir()) == [".new-young", "old"]
