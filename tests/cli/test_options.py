"""Options that would change nothing are refused, in every command, before anything is read or run."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from cakegen.cli.main import main
from cakegen.cli.options import refuse_ignored

KERNEL = ("--launch", "examples/emulate/axpy.json", "--cuda", "examples/emulate/axpy.cu")
PTX = ("--launch", "examples/emulate/tile.json", "--ptx", "examples/emulate/tile.ptx")
REQUEST = ("--stage", "front", "--tp", "8", "--tokens")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("bench", "--from", "r.jsonl", "--rows", "full"), "--rows says what to measure; --from measures nothing"),
        (("bench", "--from", "r.jsonl", "--no-chains"), "--chains says what to measure"),
        (("bench", "--no-libraries", "--library", "quack"), "--library is of chains with a library's GEMMs"),
        (("bench", "--no-rivals", "--search"), "--search is of chains with a library's GEMMs"),
        (("tune", "--from", "r.jsonl", "--repeats", "5"), "--repeats is of a run; --from measures nothing"),
        (("diff", "--limit", "2000", "--format", "html"), "--limit is of --format markdown"),
        (("diff", "--no-compile", "--jobs", "2"), "--jobs is of a compilation, which --no-compile leaves out"),
        (("bundle", "--out", "b", "--check", "--jobs", "2"), "--jobs is of a compilation; --check compiles nothing"),
        (("plan", *REQUEST, "1:9", "--measured", "t.json"), "--measured is looked up for one token count"),
        (("emulate", *REQUEST, "1", "--schedule", "late", "--seeds", "3"), "--seeds is of --schedule random"),
        (("emulate", *KERNEL, "--rank", "1"), "--rank is of a request of an export; --launch says what to run"),
        (("emulate", *KERNEL, "--model", "x"), "--model is of a request of an export"),
        (("emulate", *KERNEL, "--export", "x"), "--model is of a request of an export"),
        (("emulate", *PTX, "--arch", "sm_90a"), "--arch is of --cuda; PTX names its target itself"),
        (("mutate", "--choose", "--seeds", "3"), "--seeds is of a run; --choose runs no mutants"),
        (("mutate", "--table", "--operator", "parity"), "--operator is of a run; --table runs nothing"),
        (("mutate", "KEY", "--table"), "[KEY]... is of a run; --table runs nothing"),
        (("mutate", *KERNEL, "--model", "x"), "--model is of KEYs; --launch says what to run"),
        (("mutate", "KEY", "--entry", "f"), "--entry is of --launch, which is not there"),
    ],
)
def test_option_that_would_change_nothing_is_refused(
    line: tuple[str, ...], message: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(request.config.rootpath)
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_option_that_keeps_its_default_is_not_refused() -> None:
    @click.command()
    @click.option("--depth", default=3)
    def command(depth: int) -> None:
        refuse_ignored("is not used", "depth")
        click.echo(depth)

    assert CliRunner().invoke(command, []).output == "3\n"
    assert "--depth is not used" in CliRunner().invoke(command, ["--depth", "3"]).output
