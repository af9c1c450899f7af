"""One front and one tail in a process of their own, checked against fp64: `python tests/gpu/launch_once.py`.

Prints `launched` and the programs' keys; with `--forever` it then goes on launching until it is killed. Its
environment says where programs come from (`CAKEGEN_BUNDLE`, `CAKEGEN_CACHE_DIR`) and where no compiler is
(`CAKEGEN_NVRTC`). With a bundle it must not even look for one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TP, TOKENS = 8, 8


def main() -> None:
    """Prepare, launch and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", default="kimi_k3_latent_moe")
    parser.add_argument("--forever", action="store_true")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from support.gpu.cases import Checks, FrontCase, TailCase, make_weights
    from support.gpu.checks import check_front, check_tail

    from cakegen.compile import nvrtc
    from cakegen.runtime import shared_latent_moe

    moe = shared_latent_moe(options.export)
    weights = make_weights(moe.model, torch.device("cuda", 0), tokens=TOKENS)
    front, tail = FrontCase(moe, weights, TP, TP - 1), TailCase(moe, weights, TP, TP - 1, 2)
    checks = Checks()
    check_front(checks, front, (TOKENS,), "front")
    check_tail(checks, tail, (TOKENS,), "tail")
    compared = checks.settle()
    if os.environ.get("CAKEGEN_BUNDLE"):
        assert nvrtc._load.cache_info().misses == 0, "a compiler was looked for"
    runners = [front.prepare(TOKENS), tail.prepare(TOKENS)]
    keys = [launch.key for runner in runners if runner.plan for launch in runner.plan.launches]
    print(f"launched {' '.join(keys)}; {compared} comparisons", flush=True)
    while options.forever:
        for runner in runners:
            runner()


if __name__ == "__main__":
    main()
