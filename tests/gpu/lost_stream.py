"""Runners whose stream is destroyed behind them go on on another: `python tests/gpu/lost_stream.py`.

In a process of its own, since a driver may do anything with a handle that is gone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CYCLES = 20_000_000


def main() -> None:
    """A decode runner, and a prefill runner with partials in a workspace."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from operator_cases import front_case, tiny_latent_moe

    from cakegen.plan import plan_route
    from cakegen.runtime import Workspace, driver
    from cakegen.runtime.device import open_device
    from cakegen.runtime.runner import plan_partials

    moe, facts, tp = tiny_latent_moe(), open_device(0).facts, 2

    def partials(tokens: int) -> int:
        return plan_partials(plan_route(moe.model, stage="front", tp=tp, tokens=tokens, partials=1, device=facts))

    cut = next(tokens for tokens in range(200, moe.model.max_tokens, 256) if partials(tokens))
    for tokens, options in ((24, {}), (cut, {"workspace": Workspace("cuda:0")})):
        inputs, outputs = front_case(tp, tokens, "cuda")
        runner = moe.prepare_front(*inputs, **outputs, **options)
        expected = [value.clone() for value in runner()]
        torch.cuda.synchronize()
        for _ in range(2):
            handle = driver.call("cuStreamCreate", 1)
            with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
                torch.cuda._sleep(CYCLES)
                runner()
            driver.call("cuStreamDestroy", handle)
            values: Any = runner()
            torch.cuda.synchronize()
            assert all(map(torch.equal, values, expected)), f"T = {tokens}"
        print(f"T = {tokens}: went on", flush=True)


if __name__ == "__main__":
    main()
