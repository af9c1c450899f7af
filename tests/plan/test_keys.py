"""Keys spelled out: every key of both exports, whole, with the numbers of the form that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.models import kimi_k3_model, tiny_model

import cakegen
from cakegen.cli.main import main
from cakegen.emit.reach import reached_plans
from cakegen.errors import PlanError
from cakegen.model import Model
from cakegen.plan import Form
from cakegen.plan.keys import GRAMMARS, IN_WORDS, explain_key, split_key
from cakegen.plan.records import DecodeForm, NormPlace, Sharing
from cakegen.plan.spelling import spell_decode_key
from cakegen.registry import load_registry
from cakegen.renamed_keys import renamed_keys

PAGE = Path(cakegen.__file__).parents[1] / "docs" / "keys.md"


def forms_of(model: Model) -> dict[str, Form]:
    return {launch.key: launch.form for plan in reached_plans(model) for launch in plan.launches}


@pytest.mark.parametrize("model", [kimi_k3_model, tiny_model])
def test_every_key_says_what_its_form_is(model: Callable[[], Model]) -> None:
    forms = forms_of(model())
    assert set(forms) == set(load_registry(model().name).kernels)
    seen = set()
    for key, form in forms.items():
        kind, named, parts, arch = split_key(key)
        assert arch in ("", "sm_90a")
        grammar = IN_WORDS if kind == "decode" and arch else kind
        stage = form.stage if isinstance(form, DecodeForm) else ""
        assert named == {"decode": model().name, IN_WORDS: stage}.get(grammar, "")
        head = named + {"decode": "_decode", IN_WORDS: "_"}.get(grammar, "")
        assert f"{kind}:{head}{''.join(p.text for p in parts)}{arch and '@'}{arch}" == key
        for part in parts:
            seen.add((grammar, part.letters.spelling))
            fields = part.letters.field.split()
            assert len(fields) in (0, max(1, len(part.numbers)))
            for field, number in zip(fields, part.numbers, strict=False):
                assert getattr(form, field) == number, (key, part)
            if part.letters.field and not part.numbers:
                assert getattr(form, part.letters.field), (key, part)
        said = {field for part in parts for field in part.letters.field.split()}
        # a norm's word says which words before it hold too
        said |= {"fused_norm"} & {"fused_norm" for part in parts if part.letters.field in ("resident_b", "staged_rows")}
        said |= {"resident_b"} & {"resident_b" for part in parts if part.letters.field == "staged_rows"}
        for letters in GRAMMARS[grammar]:
            # what a decode key leaves out is off
            if kind == "decode" and letters.field and not said & set(letters.field.split()):
                default = {"block_m": 128, "token_parts": 1, "chunks_per_stage": 1}.get(letters.field, 0)
                assert getattr(form, letters.field) == default, (key, letters)
        if grammar == IN_WORDS:
            assert isinstance(form, DecodeForm)
            words = {part.text for part in parts}
            assert ("_pair" in words, "_tokens" in words) == (
                form.sharing is Sharing.PAIR,
                form.sharing is Sharing.TOKENS,
            )
            assert ("_apart" in words) == (form.norm is NormPlace.APART)
    assert len(seen) > 40


@pytest.mark.parametrize("model", [kimi_k3_model, tiny_model])
def test_every_key_in_words_has_its_earlier_spelling_in_the_table(model: Callable[[], Model]) -> None:
    """Each form was once spelled as the published ones are; the table pairs both spellings, one to one."""
    pairs = {
        f"{spell_decode_key(form, model().name, '')}@sm_90a": key
        for key, form in forms_of(model()).items()
        if isinstance(form, DecodeForm) and "@" in key
    }
    own = {old: new for old, new in renamed_keys().items() if old.startswith(f"decode:{model().name}_decode_")}
    assert {old: own.get(old) for old in pairs} == pairs
    assert len(set(own.values())) == len(own) > 100


def test_explanation_names_each_part_in_order() -> None:
    lines = list(explain_key("decode:kimi_k3_latent_moe_decode_g94_n8_r6_d2_p0_w0_t7_28_12_k112_0_o3584_c2_sf"))
    assert lines[0] == "decode:      a decode launch of kimi_k3_latent_moe"
    assert lines[1] == "_g94         a grid of 94 CTAs"
    assert (
        lines[7] == "_t7_28_12    7 router, 28 latent and 12 shared tiles; a tail's are its output's, counted as latent"
    )
    assert lines[-2] == "_sf          each CTA of a pair finishes half of the tokens"
    assert lines[-1] == "(no suffix)  sm_100a and sm_103a, whose keys are published"
    assert list(explain_key("decode:tail_tp8_n32_r7_tokens_memory_gate2@sm_90a")) == [
        "decode:      a decode launch of tail",
        "tp8          tensor-parallel degree 8",
        "_n32         a tile of 32 tokens, to which the request's are padded",
        "_r7          a ring of 7 stages",
        "_tokens      two CTAs split a tile's tokens",
        "_memory      the norm runs inside the launch; its rows go through the workspace of y",
        "_gate2       2 weight stages are issued before the routed rows are loaded",
        "@sm_90a      sm_90a",
    ]
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
        ("decode:x_decode_g94_n8@sm_90a", "a decode key with a suffix begins with decode:front_ or decode:tail_"),
        ("decode:front_n8@sm_90a", "a key of decode has tp# at 'n8'"),
        ("decode:tail_tp8_n8_r6_staged_pair@sm_90a", "nothing is spelled '_pair', which is at its end"),
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


@pytest.mark.parametrize("export", ["kimi_k3_latent_moe", "tiny_latent_moe"])
def test_show_explains_a_key_of_every_role_on_every_family(export: str) -> None:
    registry = load_registry(export)
    keys = {(registry.program(key).role, "@" in key): key for key in registry.kernels}
    assert len(keys) >= 2 * 4 + 1
    for key in keys.values():
        result = CliRunner().invoke(main, ["show", "--explain", key])
        assert result.exit_code == 0, result.output
        assert [line.rstrip() for line in result.output.splitlines()] == [line.rstrip() for line in explain_key(key)]


def test_show_explains_a_key_of_any_export() -> None:
    result = CliRunner().invoke(
        main, ["show", "--explain", "decode:other_decode_g4_n8_r6_d1_p0_w0_t0_4_0_k1_2_o512_c1"]
    )
    assert result.exit_code == 0
    assert "a decode launch of other" in result.output
    refused = CliRunner().invoke(main, ["show", "--explain", "--source", "tail_norm:e0"])
    assert refused.exit_code == 2
    assert "--explain reads keys alone" in refused.output


def test_show_names_todays_key_of_an_earlier_one() -> None:
    old, new = next(pair for pair in renamed_keys().items() if ":kimi" in pair[0])
    for options in (["--explain"], []):
        result = CliRunner().invoke(main, ["show", old, *options])
        assert result.exit_code == 0
        assert f"{old} is called {new} today" in result.stderr
    assert new in result.stdout
