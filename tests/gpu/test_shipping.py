"""What an operator does on a device: ship cubins, ask the doctor, kill processes. Each in processes of its own."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cakegen.model import DeviceFacts
from cakegen.plan import plan_route
from cakegen.registry import Registry, load_registry
from cakegen.runtime.device import open_device

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, str(Path(__file__).with_name("launch_once.py")))
CAKEGEN = (sys.executable, "-m", "cakegen")
EXPORT, TP, TOKENS = "kimi_k3_latent_moe", 8, 8
SECONDS = 150
Record = Callable[[str, object], None]


def settings(**changed: str) -> dict[str, str]:
    """This process's environment without any setting of cakegen but those."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAKEGEN_")}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **changed}


def run(*command: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, env=settings(**changed), check=False
    )


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry(EXPORT)


@pytest.fixture(scope="module")
def facts() -> DeviceFacts:
    """As an operator's tool knows them, without a launch."""
    return open_device(0).facts


@pytest.fixture(scope="module")
def keys(registry: Registry, facts: DeviceFacts) -> list[str]:
    """What the launching script needs: a front and a tail of 8 tokens."""
    requests = ({"stage": "front", "partials": 1}, {"stage": "tail", "partials": 2})
    plans = [plan_route(registry.model, tp=TP, tokens=TOKENS, device=facts, **request) for request in requests]
    return [launch.key for plan in plans for launch in plan.launches]


def test_bundle_launches_where_there_is_no_compiler(
    tmp_path: Path, keys: list[str], facts: DeviceFacts, record_property: Record
) -> None:
    bundle = tmp_path / "bundle"
    nothing = {"CAKEGEN_NVRTC": str(tmp_path / "none.so"), "CAKEGEN_CACHE_DIR": str(tmp_path / "empty")}
    options = ("--arch", facts.arch, "--out", str(bundle))
    made = run(*CAKEGEN, "bundle", *keys, *options, CAKEGEN_CACHE_DIR=str(tmp_path / "cache"))
    assert made.returncode == 0, made.stderr
    checked = run(*CAKEGEN, "bundle", *keys, *options, "--check", **nothing)
    assert checked.returncode == 0, checked.stderr
    without = run(*LAUNCH, **nothing)
    assert without.returncode != 0, "there is a compiler after all; the test would prove nothing"
    assert "CAKEGEN_NVRTC=" in without.stderr
    launched = run(*LAUNCH, **nothing, CAKEGEN_BUNDLE=str(bundle))
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.startswith(f"launched {' '.join(keys)}; ")
    assert not (tmp_path / "empty").exists(), "a machine with a bundle needs no cache"
    record_property("said", launched.stdout.strip()[-60:])


def test_program_that_the_bundle_lacks_is_refused_before_a_launch(
    tmp_path: Path, keys: list[str], facts: DeviceFacts
) -> None:
    bundle, cache = tmp_path / "bundle", str(tmp_path / "cache")
    made = run(*CAKEGEN, "bundle", keys[0], "--arch", facts.arch, "--out", str(bundle), CAKEGEN_CACHE_DIR=cache)
    assert made.returncode == 0, made.stderr
    refused = run(*LAUNCH, CAKEGEN_CACHE_DIR=cache, CAKEGEN_BUNDLE=str(bundle))
    assert refused.returncode != 0
    assert re.search(r"holds 1 programs for \w+, and not \w+\. Make it again: `cakegen bundle", refused.stderr)


def test_doctor_finds_every_route_of_this_device(tmp_path: Path, registry: Registry, facts: DeviceFacts) -> None:
    told = run(*CAKEGEN, "doctor", "--json", CAKEGEN_CACHE_DIR=str(tmp_path))
    values = json.loads(told.stdout)
    found = {finding["topic"]: finding for finding in values["findings"]}
    assert (told.returncode, values["problems"]) == (0, 0), told.stdout
    device = found["cuda:0"]
    assert device["state"] == "ok"
    assert device["facts"]["name"] == torch.cuda.get_device_name(0)
    assert device["facts"]["arch"] == facts.arch
    assert device["facts"]["sm_count"] == facts.sm_count
    routes = {topic: finding for topic, finding in found.items() if topic.startswith("cuda:0 ")}
    assert set(routes) == {f"cuda:0 {stage} {route}" for stage in ("front", "tail") for route in ("decode", "prefill")}
    target = registry.model.target(facts.arch)
    assert target is not None
    for topic, finding in routes.items():
        assert finding["state"] == "ok", topic
        assert all(str(tp) in finding["text"] for tp in target.tp_degrees), finding["text"]


def test_kill_while_compiling_leaves_a_cache_that_launches(tmp_path: Path, facts: DeviceFacts) -> None:
    """Four kills in a cold cache, each somewhere in the compilation; then a process compiles the rest and launches."""
    cache = tmp_path / "cache"
    command = (*CAKEGEN, "compile", "decode:*", "--export", EXPORT, "--arch", facts.arch, "--jobs", "4")
    for turn in range(4):
        process = subprocess.Popen(
            command, cwd=ROOT, env=settings(CAKEGEN_CACHE_DIR=str(cache)), stdout=subprocess.DEVNULL
        )
        end, before = time.monotonic() + 60, len(list(cache.rglob("*.cubin")))
        while len(list(cache.rglob("*.cubin"))) <= before and time.monotonic() < end and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.Random(turn).uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL, "it had ended before; the test would prove nothing"
    verified = run(*CAKEGEN, "cache", "verify", CAKEGEN_CACHE_DIR=str(cache))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    launched = run(*LAUNCH, CAKEGEN_CACHE_DIR=str(cache))
    assert launched.returncode == 0, launched.stderr


def test_kill_while_launching_leaves_the_device_to_the_next_process(tmp_path: Path) -> None:
    cache = {"CAKEGEN_CACHE_DIR": str(tmp_path)}
    for turn in range(2):
        process = subprocess.Popen(
            (*LAUNCH, "--forever"), cwd=ROOT, env=settings(**cache), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("launched ")
        time.sleep(random.Random(turn).uniform(0, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        process.stdout.close()
    launched = run(*LAUNCH, **cache)
    assert launched.returncode == 0, launched.stderr
