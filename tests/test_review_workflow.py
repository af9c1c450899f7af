"""The workflow for users is one: known keys, steps that do one thing, commands that run; and it does what it says.

What runs a change's code has a token that can write nothing; what can write runs none of it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.page_blocks import ROOT, command_environment, copy_checkout, needs_git

yaml = pytest.importorskip("yaml", reason="PyYAML reads the workflow")

FILE = ROOT / "docs" / "ci" / "review.yml"
# What GitHub's workflow syntax knows of what this file uses; its reference lists more.
TOP = {"name", "on", "permissions", "jobs"}
JOB = {"runs-on", "timeout-minutes", "permissions", "steps"}
STEP = {"name", "uses", "with", "run", "env", "if"}
CONTEXTS = {"github", "vars", "always"}
COMMANDS = {"cakegen", "cat", "echo", "gh", "tools/setup.sh"}
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    """The file with every scalar as its text, so that `on` is no truth value."""
    found: dict[str, Any] = yaml.load(FILE.read_text("utf-8"), Loader=yaml.BaseLoader)
    return found


@pytest.fixture(scope="module")
def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """Of both jobs, in order."""
    assert list(workflow["jobs"]) == ["review", "post"]
    for job in workflow["jobs"].values():
        assert set(job) - {"needs", "if"} == JOB
        assert 0 < int(job["timeout-minutes"]) <= 60
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflow_has_the_keys_of_one(workflow: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    assert set(workflow) == TOP
    assert set(workflow["on"]) == {"pull_request"}, "pull_request_target would give the change's code a token"
    for step in steps:
        assert set(step) <= STEP, step
        assert ("uses" in step) != ("run" in step), step
        assert "with" not in step or "uses" in step, step


def test_actions_are_named_by_commit_with_their_release() -> None:
    """A tag moves with whoever owns the action; the release behind it is for people and for update tools."""
    uses = re.findall(r"^ +(?:- )?uses: (.*)$", FILE.read_text("utf-8"), re.MULTILINE)
    assert len(uses) == 5
    for used in uses:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used


def test_job_that_runs_the_change_can_write_nothing_and_the_other_runs_nothing_of_it(workflow: dict[str, Any]) -> None:
    review, post = workflow["jobs"].values()
    assert workflow["permissions"] == {}
    assert review["permissions"] == {"contents": "read"}
    checkout = review["steps"][0]
    assert checkout["with"]["persist-credentials"] == "false", "else the token lies in .git/config"
    assert "token" not in yaml.dump(review), "no step is given one"
    assert post["permissions"] == {"pull-requests": "write"}
    assert post["needs"] == "review"
    assert "head.repo.full_name == github.repository" in post["if"]
    assert [step["uses"].split("@")[0] for step in post["steps"] if "uses" in step] == ["actions/download-artifact"]
    assert [shlex.split(step["run"])[0] for step in post["steps"] if "run" in step] == ["gh"]


def test_no_expression_stands_in_a_script(steps: list[dict[str, Any]]) -> None:
    """A branch's name is the change's: put into a script's text it would be part of the script."""
    assert [step for step in steps if "${{" in step.get("run", "")] == []


def test_expressions_name_what_is_there() -> None:
    text = FILE.read_text("utf-8")
    assert text.count("${{") == text.count("}}") == len(EXPRESSION.findall(text)) > 3
    conditions = re.findall(r"^ +if: (.*)$", text, re.MULTILINE)
    for expression in [*EXPRESSION.findall(text), *conditions]:
        words = re.findall(r"(?<![\w.'])[a-z_]+(?=[.(])", expression)
        assert words, expression
        assert set(words) <= CONTEXTS, expression


def test_scripts_are_bash_of_known_commands(steps: list[dict[str, Any]]) -> None:
    scripts = [step["run"] for step in steps if "run" in step]
    assert len(scripts) == 4
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", EXPRESSION.sub("x", script)], check=True)
        lines = [shlex.split(EXPRESSION.sub("x", line))[0] for line in script.splitlines()]
        assert set(lines) <= COMMANDS, script


@pytest.mark.slow
@needs_git
def test_steps_run_in_a_clone_and_post_what_changed(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    """All but the installation, in a clone of a checkout whose branch changes a ring; `gh` only notes its arguments."""
    upstream, clone = tmp_path / "upstream", tmp_path / "clone"
    copy_checkout(upstream)
    subprocess.run(["git", "-C", str(upstream), "branch", "--quiet", "--move", "main"], check=True)
    subprocess.run(["git", "clone", "--quiet", str(upstream), str(clone)], check=True)
    environment = command_environment(tmp_path, clone) | {
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "BASE": "origin/main",
        "NUMBER": "7",
    }
    post = tmp_path / ".bin" / "gh"
    post.write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/posted"\ncat review.md >>"{tmp_path}/posted"\n')
    post.chmod(0o755)

    def run(script: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]  # as a runner starts it
        return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=900)

    export = clone / "exports" / "tiny_latent_moe" / "hopper.toml"
    text = export.read_text()
    export.write_text(text.replace("num_stages = 4", "num_stages = 3", 1))
    assert export.read_text() != text
    check, review, comment = (step["run"] for step in steps if "run" in step and "setup" not in step["run"])
    refused = run(check)
    assert refused.returncode != 0
    assert "tiny_latent_moe: " in refused.stdout + refused.stderr
    changed = run("cakegen export tiny_latent_moe && git checkout -q -b change && git add . && git commit -qm change")
    assert changed.returncode == 0, changed.stderr
    for script in (check, review, comment):
        done = run(script)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    posted = (tmp_path / "posted").read_text()
    assert posted.startswith("pr comment 7 --edit-last --create-if-none --body-file review.md\n")
    assert "num_stages" in posted
    assert (tmp_path / "summary.md").read_text() in posted
    assert os.path.getsize(clone / "review.html") > 10_000
