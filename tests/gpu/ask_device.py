"""Ask a Hopper device what the ISA leaves open: `python tests/gpu/ask_device.py FOLDER [QUESTION ...]`.

Writes `answers.json` and `answers.npz` into FOLDER after every question, so that a fault costs only what comes behind
it; a question that was named alone keeps the answers that are there. No kernel waits for anything without a limit.
Takes about half a minute.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 110


def main(arguments: list[str]) -> int:
    """Ask, write, and say how it went; 1 when a question was not answered."""
    if not arguments:
        print(__doc__)
        return 2
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    import numpy as np
    from support.emulator.question_backends import run_on_device
    from support.emulator.questions import plain, questions

    from cakegen.errors import CakeError

    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    answers, arrays = _earlier(folder)
    answers["device"] = describe_device()
    wrong = 0
    for name, ask in questions():
        if arguments[1:] and name not in arguments[1:]:
            continue
        start = time.monotonic()
        try:
            answers[name] = plain(ask(run_on_device, arrays))
        except (CakeError, RuntimeError, AssertionError) as error:
            answers[name] = {"no answer": f"{type(error).__name__}: {error}"}
            wrong += 1
        print(
            f"{name}: {'no answer' if 'no answer' in answers[name] else 'answered'} in {time.monotonic() - start:.1f} s"
        )
        (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
        np.savez_compressed(folder / "answers.npz", **arrays)
    faulthandler.cancel_dump_traceback_later()
    return 1 if wrong else 0


def _earlier(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import numpy as np

    if not (folder / "answers.npz").exists():
        return {}, {}
    with np.load(folder / "answers.npz") as kept:
        arrays = dict(kept)
    return json.loads((folder / "answers.json").read_text(encoding="utf-8")), arrays


def describe_device() -> dict[str, str]:
    """What answered, and when."""
    import torch

    from cakegen.compile import load_nvrtc
    from cakegen.runtime import driver
    from cakegen.runtime.device import open_device

    version = driver.call("cuDriverGetVersion")
    return {
        "name": open_device(0).name,
        "driver": f"for CUDA {version // 1000}.{version % 1000 // 10}",
        "nvrtc": load_nvrtc().release,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
