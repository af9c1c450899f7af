"""What a file of results says of its origin."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cakegen
from cakegen.bench import provenance

CPU = torch.device("cpu")
IS_CHECKOUT = (Path(cakegen.__file__).resolve().parents[1] / ".git").exists()


def test_named_commit_goes_before_gits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_COMMIT", "c0ffee")
    assert provenance.read_commit() == "c0ffee"


@pytest.mark.parametrize(("changed", "wanted"), [("", "abc"), (" M file\n", "abc+")])
@pytest.mark.skipif(not IS_CHECKOUT, reason="needs a git checkout")
def test_changed_tree_is_marked(monkeypatch: pytest.MonkeyPatch, changed: str, wanted: str) -> None:
    monkeypatch.delenv("CAKEGEN_COMMIT", raising=False)
    answers = {"rev-parse": "abc\n", "status": changed}

    def run(command: tuple[str, ...], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=0, stdout=answers[command[3]], stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert provenance.read_commit() == wanted


def test_header_is_complete_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_COMMIT", "c0ffee")
    found = provenance.read_provenance(CPU)
    assert {"date", "device", "driver", "nvrtc", "torch", "torch_cuda", "triton", "commit", "clocks"} <= set(found)
    assert found["torch"] == torch.__version__
    assert found["clocks"] == {"unknown": "cpu is no CUDA device"}


@pytest.mark.parametrize("answer", ["", "nvidia-smi: not found", "one, two"])
def test_unreadable_clocks_keep_the_answer(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="x"))
    monkeypatch.setattr(provenance, "_output", lambda *command: answer)
    assert provenance.read_clocks(torch.device("cuda", 0)) == {"unknown": answer}


def test_clocks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def output(*command: str) -> str:
        asked.extend(command)
        return "NVIDIA H200, 580.159.04, 1980, 3201, 1980, 512.3, 700.00, 45, P0"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(provenance, "_output", output)
    clocks = provenance.read_clocks(torch.device("cuda", 0))
    assert (clocks["driver_version"], clocks["clocks.sm"], clocks["power.draw"]) == ("580.159.04", "1980", "512.3")
    assert asked[-1] == "GPU-12-34"
