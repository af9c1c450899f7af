"""Launch files: what is read, and what is refused, with the field and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from cakegen.emulator.launches.arrays import ELEMENTS
from cakegen.errors import SpecError
from cakegen.spec import launch_file
from cakegen.spec.launch_file import LaunchFile, parse_launch_file, triple


def minimal() -> dict[str, Any]:
    return {
        "version": 1,
        "buffers": {"x": {"role": "read", "element": "f32", "shape": [4], "fill": 0.5}},
        "launches": [{"grid": [2], "block": [32], "arguments": [{"kind": "buffer", "name": "x"}]}],
    }


def parse(tmp_path: Path, content: Any) -> LaunchFile:
    file = tmp_path / "launch.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_launch_file(file)


def test_minimal_file_gets_its_defaults(tmp_path: Path) -> None:
    launch = parse(tmp_path, minimal()).launches[0]
    assert (launch.entry, launch.cluster, launch.dynamic_smem_bytes) == (None, (1, 1, 1), 0)
    assert not launch.cooperative
    assert not launch.programmatic
    assert triple(launch.grid) == (2, 1, 1)


def test_every_kind_of_argument_is_read(tmp_path: Path) -> None:
    content = minimal()
    content["launches"][0]["arguments"] = [
        {"kind": "buffer", "name": "x", "offset_bytes": 8},
        {"kind": "u64", "value": 2**64 - 1},
        {"kind": "bf16", "value": -1.5},
        {"kind": "bytes", "hex": "00fF10"},
        {"kind": "tensor_map", "name": "x", "dims": [8, 4], "strides_bytes": [16], "box": [8, 1], "swizzle": "32B"},
    ]
    arguments = parse(tmp_path, content).launches[0].arguments
    assert [each.kind for each in arguments] == ["buffer", "u64", "bf16", "bytes", "tensor_map"]
    assert isinstance(arguments[1], launch_file.ScalarSection)
    assert arguments[1].value == 2**64 - 1


def test_element_types_are_those_of_the_emulator() -> None:
    assert set(get_args(launch_file.Element)) == set(ELEMENTS)


def buffers(**fields: Any) -> dict[str, Any]:
    return {"buffers": {"x": {"role": "read", "element": "f32"} | fields}}


def launch(**fields: Any) -> dict[str, Any]:
    return {"launches": [{"grid": [2], "block": [32], "arguments": []} | fields]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version = 2: Input should be 1"),
        ({"lunches": []}, "lunches: unknown key; remove it, or correct its spelling"),
        ({"launches": []}, r"launches = \[\]: Tuple should have at least 1 item"),
        (buffers(), r"buffers.x: needs either a file, or a shape"),
        (buffers(file="x.npy", shape=[3]), r"buffers.x: needs either a file, or a shape"),
        (buffers(file="x.npy", fill=1.0), r"buffers.x: fill = 1.0 beside a file; its values come from the file"),
        (buffers(shape=[3]), "a buffer of role 'read' needs its first values: a file or a fill"),
        (buffers(shape=[0], fill=1.0), "buffers.x.shape.0 = 0: Input should be greater than or equal to 1"),
        (buffers(shape=[3], fill="zero"), "buffers.x.fill"),
        (buffers(shape=[3], fill=0.0, element="fp32"), "buffers.x.element = 'fp32': Input should be 'bf16', 'f16'"),
        (buffers(shape=[3], fill=0.0, role="out"), "buffers.x.role = 'out': Input should be 'read', 'write' or 'upd"),
        (launch(grid=[]), "launches.0.grid = "),
        (launch(grid=["2"]), "launches.0.grid.0 = '2': Input should be a valid integer"),
        (launch(block=[32, 33]), r"launches.0.block = \[32, 33\]: 1056 threads; a CTA has at most 1024"),
        (launch(cluster=[2, 1, 9]), r"launches.0.cluster = \[2, 1, 9\]: 18 CTAs; at most 16"),
        (launch(grid=[3, 4], cluster=[2]), r"launches.0.grid = \[3, 4\]: no whole clusters of \[2\]"),
        (launch(programmatic=True), "launches.0.programmatic: the first launch has none before it to overlap"),
        (launch(entry="a b"), "launches.0.entry = 'a b': String should match pattern"),
        (launch(dynamic_smem_bytes=232449), "launches.0.dynamic_smem_bytes = 232449: Input should be less"),
        (launch(barriers={"full": 12}), "launches.0.barriers.full = 12: Input should be a multiple of 8"),
        (launch(arguments=[{"kind": "buffer", "name": "y"}]), "launches.0.arguments.0: no buffer 'y'; the file has x"),
        (launch(arguments=[{"kind": "int", "value": 1}]), r"launches.0.arguments.0 = .*tag 'int' found using 'kind'"),
        (launch(arguments=[{"kind": "i32"}]), "launches.0.arguments.0.i32.value: missing"),
        (launch(arguments=[{"kind": "bytes", "hex": "0"}]), "launches.0.arguments.0.bytes.hex = '0'"),
    ],
)  # fmt: skip
def test_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse(tmp_path, minimal() | change)
    assert str(caught.value).startswith("launch.json: ")


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        parse(tmp_path, minimal() | launch(block=[2048], programmatic=True) | buffers(shape=[3]))
    assert len(str(caught.value).splitlines()) == 3


def test_missing_file_and_wrong_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file or directory; give a JSON file of launches"):
        parse_launch_file(tmp_path / "none.json")
    with pytest.raises(SpecError, match=r"launch.json: the file = '\{': Invalid JSON"):
        parse(tmp_path, "{")
