"""A caller of the published functions of the block: their names, arguments and refusals, and nothing else of theirs.

It knows no more of cakegen than the one import line; where the functions are asked for is a parameter's default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch

HIDDEN, LATENT, EXPERTS, SHARED, EPS = 7168, 3584, 896, 6144, 1e-5
Tensors = dict[str, torch.Tensor]


class Layer:
    """Random weights of one rank, and the documented formulas in fp32."""

    def __init__(self, device: torch.device, tp: int, rank: int) -> None:
        self.device, self.tp, self.rank, self.local = device, tp, rank, SHARED // tp
        self._seed = torch.Generator(device).manual_seed(2024)
        self.gate, self.down = self._weight(EXPERTS, HIDDEN), self._weight(LATENT, HIDDEN)
        self.gate_up, self.up = self._weight(2 * self.local, HIDDEN), self._weight(HIDDEN, LATENT)
        self.shared_down = self._weight(HIDDEN, self.local)
        self.norm = (1 + 0.1 * self.random(LATENT).float()).bfloat16()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._seed, device=self.device).bfloat16()

    def _weight(self, rows: int, cols: int) -> torch.Tensor:
        return (self.random(rows, cols).float() / math.sqrt(cols)).bfloat16()

    def outputs(self, tokens: int) -> Tensors:
        """Every output, full of what no result is."""
        widths = {"logits": EXPERTS, "latent": LATENT, "shared_act": self.local, "y_workspace": LATENT, "out": HIDDEN}
        return {
            name: torch.full(
                (tokens, width),
                float("nan"),
                device=self.device,
                dtype=torch.float32 if name == "logits" else torch.bfloat16,
            )
            for name, width in widths.items()
        }

    def expected_front(self, x: torch.Tensor) -> Tensors:
        wide = x.float()
        gate, up = (wide @ self.gate_up.float().T).chunk(2, dim=1)
        act = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        return {"logits": wide @ self.gate.float().T, "latent": wide @ self.down.float().T, "shared_act": act}

    def expected_tail(self, routed: torch.Tensor, act: torch.Tensor) -> Tensors:
        total = routed.float().sum(0).bfloat16().float()
        scaled = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
        y = self.norm * scaled.bfloat16()
        width = LATENT // self.tp
        cols = slice(self.rank * width, (self.rank + 1) * width)
        out = y[:, cols].float() @ self.up[:, cols].float().T + act.float() @ self.shared_down.float().T
        return {"y_workspace": y, "out": out}


def check_close(found: Tensors, expected: Tensors) -> None:
    for name, values in expected.items():
        tolerance = 1e-3 if name == "logits" else 1e-2
        torch.testing.assert_close(found[name].float(), values.float(), atol=tolerance, rtol=tolerance, msg=name)


def call_block(
    functions: ModuleType, layer: Layer, tokens: int, replay: Callable[[Callable[[], object]], None] | None = None
) -> tuple[object, object]:
    """Prepare, call and (with `replay`, which captures a call and replays it) replay both stages; the two runners."""
    x, routed, out = layer.random(tokens, HIDDEN), layer.random(1, tokens, LATENT), layer.outputs(tokens)
    weights = (layer.gate, layer.down, layer.gate_up)
    front_outputs = (out["logits"], out["latent"], out["shared_act"])
    front = functions.prepare_kimi_k3_latent_moe_front(x, *weights, *front_outputs)
    assert all(given is kept for given, kept in zip(front(), front_outputs, strict=True))
    check_close(out, layer.expected_front(x))
    act = out["shared_act"].clone()
    operands = (routed, layer.norm, layer.up, act, layer.shared_down, out["out"])
    options = {"tp": layer.tp, "rank": layer.rank, "y_workspace": out["y_workspace"]}
    tail = functions.prepare_kimi_k3_latent_moe_tail(*operands, **options)
    y, result = tail.launch()
    assert y is out["y_workspace"]
    assert result is out["out"]
    check_close(out, layer.expected_tail(routed, act))
    first = {name: tensor.clone() for name, tensor in out.items()}
    for runner, names in ((front, ("logits", "latent", "shared_act")), (tail, ("y_workspace", "out"))):
        _poison(out)
        runner() if replay is None else replay(runner)
        assert all(torch.equal(first[name], out[name]) for name in names)
    _poison(out)
    for call in (
        lambda: functions.kimi_k3_latent_moe_front(x, *weights, *front_outputs, backend="cake"),
        lambda: functions.kimi_k3_latent_moe_tail(*operands, **options),
    ):
        again = call()
        assert again is out["out"] or all(a is b for a, b in zip(again, front_outputs, strict=True))
    assert all(torch.equal(first[name], out[name]) for name in out)
    return front, tail


def _poison(outputs: Tensors) -> None:
    for tensor in outputs.values():
        tensor.fill_(float("nan"))


def refusals(functions: ModuleType, layer: Layer) -> list[tuple[type[Exception], Callable[[], object]]]:
    """Calls that the documentation refuses, each with its exception."""
    tokens = 3
    x, routed, out = layer.random(tokens, HIDDEN), layer.random(1, tokens, LATENT), layer.outputs(tokens)
    front = {"x": x, "gate_weight": layer.gate, "down_weight": layer.down, "shared_gate_up_weight": layer.gate_up}
    front |= {name: out[name] for name in ("logits", "latent", "shared_act")}
    tail = {"routed": routed, "norm_weight": layer.norm, "up_weight": layer.up}
    tail |= {"shared_act": layer.random(tokens, layer.local), "shared_down_weight": layer.shared_down}
    tail |= {"out": out["out"], "y_workspace": out["y_workspace"]}
    options = {"tp": layer.tp, "rank": layer.rank}

    def of_front(**changed: object) -> Callable[[], object]:
        return lambda: functions.prepare_kimi_k3_latent_moe_front(**(front | changed))

    def of_tail(**changed: object) -> Callable[[], object]:
        return lambda: functions.prepare_kimi_k3_latent_moe_tail(**(tail | options | changed))

    return [
        (ValueError, of_front(backend="auto")),
        (ValueError, of_front(x=x.float())),
        (ValueError, of_front(x=layer.random(tokens, 2 * HIDDEN)[:, :HIDDEN])),
        (ValueError, of_front(latent=out["latent"][:2])),
        (ValueError, of_front(logits=out["logits"].bfloat16())),
        (ValueError, of_front(shared_gate_up_weight=layer.random(2 * SHARED // 4, HIDDEN))),
        (TypeError, of_front(gate_weight=[1.0])),
        (ValueError, of_tail(tp=4)),
        (ValueError, of_tail(rank=layer.tp)),
        (ValueError, of_tail(rank=-1)),
        (ValueError, of_tail(routed=routed[0])),
        (ValueError, of_tail(norm_weight=layer.norm[:-1])),
        (ValueError, of_tail(backend="reference")),
        (TypeError, of_tail(out=None)),
        (ValueError, lambda: functions.generated_program_available(layer.device, "front")),
    ]
