"""Checkpoints that other frameworks wrote, by the scripts `write_….py`.

The frameworks need gigabytes and do not go together with what the tests need. So what their scripts
wrote is kept, small, as a zip file: `make test-frameworks` installs them in an environment of their
own and reads what they write today.
"""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = os.environ.get("CKPTKIT_FRAMEWORKS")
"""The interpreter that has the frameworks; without it the kept files are read."""


def written_by(framework: str, folder: Path) -> Path:
    """The folder with what `write_<framework>.py` writes: a checkpoint in a folder for each case,
    and what the framework itself loads from it in a file `.npz` of the same name.
    """
    if PYTHON:
        script = HERE / f"write_{framework}.py"
        subprocess.run([PYTHON, str(script), str(folder)], check=True)
    else:
        with zipfile.ZipFile(HERE / f"{framework}.zip") as file:
            file.extractall(folder)
    return folder
