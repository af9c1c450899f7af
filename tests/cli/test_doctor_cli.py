"""`cakegen doctor`: text, JSON and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cakegen.cli.main import main


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CAKEGEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path))


def test_doctor_prints_a_line_a_finding_and_the_same_as_json() -> None:
    runner = CliRunner()
    text = runner.invoke(main, ["doctor", "--export", "tiny_latent_moe"])
    values = json.loads(runner.invoke(main, ["doctor", "--export", "tiny_latent_moe", "--json"]).output)
    lines = text.output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [finding["state"] for finding in values["findings"]]
    assert lines[-1] == f"{values['problems']} problems"
    assert text.exit_code == (1 if values["problems"] else 0)
    assert {"python", "torch", "driver", "nvrtc", "cache", "tree"} <= {f["topic"] for f in values["findings"]}


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from cakegen.cli.main import main
main(["doctor", "--export", "tiny_latent_moe", "--json"])
"""


def test_doctor_looks_at_everything_else_where_torch_is_absent() -> None:
    """The case that it is for: torch is what is most often missing, or broken."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    values = json.loads(done.stdout)
    states = {finding["topic"]: finding["state"] for finding in values["findings"]}
    assert (done.returncode, states["torch"]) == (1, "problem"), done.stderr
    assert {"driver", "nvrtc", "cache", "tree", "python", "cakegen"} <= set(states)
    assert states["tree"] == "ok"
    assert "devices" in states or "cuda:0" in states


def test_doctor_fails_where_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKEGEN_NVRTC", "/none.so")
    result = CliRunner().invoke(main, ["doctor", "--export", "tiny_latent_moe"])
    assert result.exit_code == 1
    assert "problem  nvrtc" in result.output
