"""Keys spelled out: every key of both exports, whole, with the numbers of the form that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from models import kimi_k3_model, tiny_model

import cakegen
from cakegen.cli.main import main
from cakegen.emit.reach import reached_plans
from cakegen.errors import PlanError
from cakegen.model import Model
from cakegen.plan import Form
from cakegen.plan.keys import GRAMMARS, explain_key, split_key
from cakegen.registry import load_registry

PAGE = Path(cakegen.__file__).parents[1] / "docs" / "keys.md"


def forms_of(model: Model) -> dict[str, Form]:
    return {launch.key: launch.form for plan in reached_plans(model) for launch in plan.launches}


@pytest.mark.parametrize("model", [kimi_k3_model, tiny_model])
def test_every_key_says_what_its_form_is(model: Callable[[], Model]) -> None:
    forms = forms_of(model())
    assert set(forms) == set(load_registry(model().name).kernels)
    seen = set()
    for key, form in forms.items():
        kind, export, parts, arch = split_key(key)
        assert arch in ("", "sm_90a")
        assert export == (model().name if kind == "decode" else "")
        assert (
            f"{kind}:{export}{'_decode' if export else ''}{''.join(p.text for p in parts)}{arch and '@'}{arch}" == key
        )
        for part in parts:
            seen.add((kind, part.letters.spelling))
            fields = part.letters.field.split()
            assert len(fields) in (0, max(1, len(part.numbers)))
            for field, number in zip(fields, part.numbers, strict=False):
                assert getattr(form, field) == number, (key, part)
            if part.letters.field and not part.numbers:
                assert getattr(form, part.letters.field), (key, part)
        said = {field for part in parts for field in part.letters.field.split()}
        for letters in GRAMMARS[kind]:
            # what a decode key leaves out is off
            if kind == "decode" and letters.field and not said & set(letters.field.split()):
                default = {"block_m": 128, "token_parts": 1}.get(letters.field, 0)
                assert getattr(form, letters.field) == default, (key, letters)
    assert len(seen) > 25


def test_explanation_names_each_part_in_order() -> None:
    lines = list(explain_key("decode:kimi_k3_latent_moe_decode_g94_n8_r6_d2_p0_w0_t7_28_12_k112_0_o3584_c2_sf@sm_90a"))
    assert lines[0] == "decode:      a decode launch of kimi_k3_latent_moe"
    assert lines[1] == "_g94         a grid of 94 CTAs"
    assert (
        lines[7] == "_t7_28_12    7 router, 28 latent and 12 shared tiles; a tail's are its output's, counted as latent"
    )
    assert lines[-2] == "_sf          each CTA of a pair finishes half of the tokens"
    assert lines[-1] == "@sm_90a      sm_90a"
    assert list(explain_key("tail_norm:e0"))[1:] == [
        "e0           the next launch is released behind the stores",
        "(no suffix)  sm_100a and sm_103a, whose keys are published",
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("front", "no logical key; one begins with decode:, front:, tail_gemm:, tail_norm:"),
        ("middle:i768", "no logical key; one begins with"),
        ("front:e1", "a key of front has i# at 'e1'"),
        ("decode:x_decode_g94_n8", "a key of decode has _r# at ''"),
        ("tail_gemm:tp8e0f0z9", "nothing is spelled 'z9', which is at its end"),
        ("front:e1i768", "a key of front has i# at"),
        ("decode:x_decode_g1_n8_r6_d2_p0_w0_t1_1_1_k1_0_o1_c1_fp3", "nothing is spelled '_fp3'"),
    ],
)
def test_what_is_no_key_is_refused_where_it_ends(key: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        list(explain_key(key))
    assert message in str(caught.value)


def test_page_lists_every_letter_with_its_meaning() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for letters in (each for grammar in GRAMMARS.values() for each in grammar):
        meaning = f"{letters.meaning}; 0: {letters.negated}" if letters.negated else letters.meaning
        assert f"| `{letters.spelling}` | {meaning} |" in text
    rows = text.count("\n| `")
    assert rows == sum(map(len, GRAMMARS.values()))


def test_show_explains_a_key_of_any_export() -> None:
    result = CliRunner().invoke(
        main, ["show", "--explain", "decode:other_decode_g4_n8_r6_d1_p0_w0_t0_4_0_k1_2_o512_c1"]
    )
    assert result.exit_code == 0
    assert "a decode launch of other" in result.output
    refused = CliRunner().invoke(main, ["show", "--explain", "--source", "tail_norm:e0"])
    assert refused.exit_code == 2
    assert "--explain reads the key alone" in refused.output
