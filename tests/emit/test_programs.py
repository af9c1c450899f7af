"""What the text of every committed program keeps, whatever its template: the order of launches, names, parameters."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from support.models import hopper

from cakegen import paths
from cakegen.arch import architecture
from cakegen.emit.decode import decode_program
from cakegen.emit.decode_line import decode_line
from cakegen.model import DeviceFacts, Model
from cakegen.plan import DecodeForm, plan_route
from cakegen.registry import REGISTRY_FILE, Program, Registry, load_registry

MOST_PROGRAM_LINES, MOST_HEADER_LINES, MOST_KERNEL_LINES, MOST_REGISTRY_LINES = 160, 450, 50_000, 9_000
EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))


@pytest.fixture(params=EXPORTS)
def registry(request: pytest.FixtureRequest) -> Registry:
    return load_registry(request.param)


def kernels(registry: Registry) -> Iterator[tuple[Program, str]]:
    for program in registry.programs.values():
        yield program, registry.read(program.kernel_source)


def test_family_uses_nothing_of_the_other(registry: Registry) -> None:
    """Neither a program nor a header that it includes; comments may compare."""
    foreign = {"sm90": r"tcgen05|tmem|cta_group", "sm100": r"wgmma|setmaxnreg"}
    own = {"sm90": "wgmma", "sm100": "tcgen05"}
    found = set()
    for program, text in kernels(registry):
        families = {architecture(arch).family for arch in program.arches}
        code = re.sub(r"//.*", "", "".join((text, *map(registry.read, program.headers))))
        for family in families:
            assert re.findall(foreign[family], code, re.IGNORECASE) == [], program.name
            found |= {family} if own[family] in code else set()
    assert found == set(foreign), "the words are those that the families use"


def test_grids_are_whole_clusters(registry: Registry) -> None:
    checked = set()
    for target in registry.model.targets:
        for sm_count, tp in itertools.product(target.sm_counts, target.tp_degrees):
            device = DeviceFacts.nominal(target.arch, sm_count)
            for stage, tokens in itertools.product(("front", "tail"), (1, 9, 33, 128, 129, 520, 1100, 4097)):
                plan = plan_route(registry.model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device)
                for launch in plan.launches:
                    if launch.key not in registry.kernels:  # planned, and no program yet
                        continue
                    cluster = registry.program(launch.key).launch.cluster
                    sizes = zip(launch.grid_ctas, cluster, strict=True)
                    assert all(grid % size == 0 for grid, size in sizes), f"{launch.key}: {launch.grid_ctas}, {cluster}"
                    checked.add((registry.program(launch.key).role, cluster))
    assert {cluster for _, cluster in checked} == {(1, 1, 1), (2, 1, 1)}


def test_hopper_decode_clips_its_boxes_of_tokens_and_nothing_else_does(registry: Registry) -> None:
    for program in registry.programs.values():
        clipped = [entry for entry in program.tensor_maps if entry.token_parts]
        expected = {"decode_front": ["x"], "decode_tail": ["shared_act", "y_workspace"]}
        # a tail whose y is resident has no map of it
        mapped = {entry.name for entry in program.tensor_maps}
        names = [name for name in expected.get(program.role, []) if name in mapped and "sm_90a" in program.arches]
        assert [entry.name for entry in clipped] == names, program.name
        boxes = re.findall(
            r"token_tiles\(\"\w+\", \{(?:true|false), 64, \d+, (\d)\}", registry.read(program.binding_source)
        )
        assert boxes == [str(entry.box[2]) for entry in clipped], program.name


def test_gemm_behind_a_norm_is_launched_programmatically_and_the_norm_is_not(registry: Registry) -> None:
    """The GEMM reads shared_act before it waits for the norm, so the norm must have waited for the front."""
    for program in registry.programs.values():
        launch, fused = program.launch, ("buffer", "routed") in program.arg_plan
        if program.role == "tail_gemm":
            # one that normalises itself waits first for what a caller launches before it
            assert (launch.programmatic, launch.overlap, launch.cooperative) == (not fused, fused, fused), program.name
        elif program.role == "tail_norm":
            assert not launch.programmatic


def test_every_constant_is_read(registry: Registry) -> None:
    """By what the kernel includes, itself or its binding; what nothing reads only misleads."""
    for program, text in kernels(registry):
        others = (program.binding_source, *program.headers)
        code = re.sub(r"//.*", "", "".join((text, *map(registry.read, others))))
        constants = re.findall(r"static constexpr \w+ (k\w+) =", code)
        assert constants
        uses = Counter(re.findall(r"\w+", code))
        unread = {name for name in constants if uses[name] == 1}
        assert unread == set(), f"{program.name} ({program.role}): {sorted(unread)}"


def test_program_names_itself_in_the_wait_record(registry: Registry) -> None:
    for program, text in kernels(registry):
        digest = program.name.rsplit("_", 1)[-1]
        assert program.name.startswith(f"cake_{registry.export}_{program.role}_sm")
        assert re.fullmatch(r"[0-9a-f]{20}", digest)
        found = [int(number, 16) for number in re.findall(r"kProgramId = 0x([0-9A-Fa-f]+)u?;", text)]
        assert found == [int(digest[:8], 16)] * (("buffer", "wait_record") in program.arg_plan), program.name


def declared(text: str, symbol: str) -> list[tuple[str, str]]:
    """(kind, name) of a kernel's parameters as its text declares them."""
    found = re.search(rf"{symbol}\(([^)]*)\)", text)
    assert found is not None, symbol
    kinds = []
    for parameter in found.group(1).split(","):
        words = parameter.split()
        if "TensorMap" in words:
            kinds.append(("tma_buffer", words[-1].removesuffix("_map")))
        else:
            kinds.append(("buffer" if words[-2].endswith("*") else "parameter", words[-1]))
            assert words[-2] == "u32" or words[-2].endswith("*"), parameter
    return kinds


def test_kernel_takes_the_argument_plan_in_its_order(registry: Registry) -> None:
    for program, text in kernels(registry):
        expected = [argument for argument in program.arg_plan if argument[0] != "grid"]
        assert declared(text, program.kernel_symbol) == expected, program.name


def test_barriers_lie_in_the_order_of_the_registry(registry: Registry) -> None:
    """A report of a stuck wait names a barrier by its place."""
    for program, text in kernels(registry):
        offset = 0
        for name, count in program.barriers:
            constant = f"k{''.join(word.capitalize() for word in name.split('_'))}Offset"
            (found,) = re.findall(rf"{constant} = (\d+)u?;", text)
            assert int(found) == offset, f"{program.name} {name}"
            offset += 8 * count


def test_trees_keep_to_their_lines(registry: Registry) -> None:
    """What a reader has to open: a program, a header, all kernels with their headers, the registry."""
    lengths = {program.name: text.count("\n") for program, text in kernels(registry)}
    headers = {
        name: registry.read(name).count("\n") for program in registry.programs.values() for name in program.headers
    }
    assert max(lengths.values()) <= MOST_PROGRAM_LINES, max(lengths, key=lambda name: lengths[name])
    assert max(headers.values()) <= MOST_HEADER_LINES, max(headers, key=lambda name: headers[name])
    assert sum(lengths.values()) + sum(headers.values()) <= MOST_KERNEL_LINES
    assert (paths.generated_root() / registry.export / REGISTRY_FILE).read_text().count("\n") <= MOST_REGISTRY_LINES


def first_sums(model: Model, form: DecodeForm) -> tuple[int, ...]:
    """K chunks of the first of two sums that a token of Hopper's decode is added up in; none where it has one sum."""
    # a constant may name a macro, which the key's compile line defines
    defined = decode_line(model, form)
    program = decode_program(model, form, "sm90")
    constants = {each.name: int(defined.get(str(each.value), each.value)) for each in program.constants}
    if constants["kClusterCtas"] == 2:
        names = ("kRank0Units", "kRank0DownUnits", "kRank0UpUnits")
    elif constants["kTokenParts"] > 1 and constants["kTwoSums"]:
        names = ("kFirstUnits", "kFirstDownUnits", "kFirstUpUnits")
    else:
        return ()
    return tuple(constants[name] * constants["kChunksPerStage"] for name in names if name in constants)


def test_a_token_of_hopper_is_added_up_in_the_same_halves_however_many_come_with_it(registry: Registry) -> None:
    model, device = registry.model, DeviceFacts.nominal("sm_90a", 132)
    target = model.target("sm_90a")
    assert target is not None
    found = set()
    for stage, tp in itertools.product(("front", "tail"), target.tp_degrees):
        halves = set()
        for tokens in hopper(model).decode.n_pads:
            form = plan_route(model, stage=stage, tp=tp, tokens=tokens, partials=1, device=device).launches[0].form
            halves |= {first_sums(model, form)} if isinstance(form, DecodeForm) else set()
        found |= halves - {()}
        assert len(halves - {()}) <= 1, (stage, tp, halves)
    assert len(found) > 3
