"""Python, torch, driver, NVRTC, cache, bundle, tree and settings. Imports compile, registry and runtime."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cakegen import __version__, paths
from cakegen.compile.bundle import BUNDLE_VARIABLE, KEY_VARIABLE
from cakegen.compile.cache_folder import CACHE_VARIABLE, cache_root
from cakegen.compile.inventory import list_files, read_entries
from cakegen.compile.nvrtc import NVRTC_PATH_VARIABLE, load_nvrtc
from cakegen.doctor.bundles import examine_bundles
from cakegen.doctor.finding import ABSENT, OK, PROBLEM, Finding
from cakegen.errors import CakeError, CompileError, LaunchError
from cakegen.known_faults import KNOWN_FAULTS
from cakegen.registry import Registry, load_registry
from cakegen.runtime import driver

SETTINGS = (
    BUNDLE_VARIABLE,
    KEY_VARIABLE,
    CACHE_VARIABLE,
    NVRTC_PATH_VARIABLE,
    "CAKEGEN_CHAOS_SEED",
    "CAKEGEN_CHECK_CALLS",
    "CAKEGEN_COMMIT",
    "CAKEGEN_FUZZ_EXAMPLES",
    "CAKEGEN_FUZZ_MUTATIONS",
    "CAKEGEN_GPU_SECONDS",
    "CAKEGEN_SUMMARY",
    "CAKEGEN_TEST_NVRTC",
    "CAKEGEN_TORCH",
    "CAKEGEN_WAIT_SECONDS",
)
_PREFIX = "CAKEGEN_"


def examine_machine(export: str) -> Iterator[Finding]:
    """Look at everything but the devices.

    Parameters
    ----------
    export
        Export whose generated tree is looked at, or a tree's folder.
    """
    yield _python()
    yield _cakegen()
    yield _torch()
    yield _driver()
    registry, tree = _tree(export)
    yield tree
    arches = () if registry is None else tuple(sorted({a for p in registry.programs.values() for a in p.arches}))
    yield _nvrtc(arches)
    yield from _known_faults(arches)
    yield _cache()
    yield from examine_bundles(registry)
    yield from _settings()


def _python() -> Finding:
    version, machine = platform.python_version(), f"{platform.system()} {platform.machine()}"
    supported = (3, 11) <= sys.version_info[:2] < (3, 14)
    text = f"{version} ({sys.executable}), {machine}"
    if not supported:
        text += "; cakegen needs 3.11 to 3.13"
    facts = {"version": version, "executable": sys.executable, "machine": machine}
    return Finding("python", OK if supported else PROBLEM, text, facts)


def _cakegen() -> Finding:
    where = str(Path(paths.__file__).parent)
    kind = "checkout" if paths.is_checkout() else "installed package"
    return Finding(
        "cakegen", OK, f"{__version__}, {kind} {where}", {"version": __version__, "path": where, "kind": kind}
    )


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Finding("torch", PROBLEM, f"can't be imported ({error}); install torch >= 2.6", {"version": None})
    cuda = torch.version.cuda
    facts = {"version": torch.__version__, "cuda": cuda, "sees_a_device": bool(torch.cuda.is_available())}
    if cuda is None:
        text = f"{torch.__version__}, built without CUDA: backend='reference' and the emulator only"
        return Finding("torch", ABSENT, text, facts)
    sees = "sees a device" if facts["sees_a_device"] else "sees no device"
    return Finding("torch", OK, f"{torch.__version__}, built for CUDA {cuda}, {sees}", facts)


def _driver() -> Finding:
    try:
        version = int(driver.call("cuDriverGetVersion"))
    except LaunchError as error:
        return Finding("driver", ABSENT, str(error), {"cuda": None})
    major, minor = version // 1000, version % 1000 // 10
    facts = {"cuda": f"{major}.{minor}"}
    try:
        compiler = load_nvrtc().version
    except CompileError:
        compiler = (0, 0)
    if compiler[0] > major:
        text = (
            f"for CUDA {major}.{minor}; NVRTC {compiler[0]}.{compiler[1]} is of a newer major version, whose code this "
            f"driver may refuse. Update the driver, or install nvidia-cuda-nvrtc < {major + 1}"
        )
        return Finding("driver", PROBLEM, text, facts)
    return Finding("driver", OK, f"for CUDA {major}.{minor}", facts)


def _tree(export: str) -> tuple[Registry | None, Finding]:
    try:
        registry = load_registry(export)
        for program in registry.programs.values():
            for name in (*program.sources, *program.headers):
                registry.read_known(program, name)
    except CakeError as error:
        return None, Finding("tree", PROBLEM, str(error), {"export": export})
    text = f"{registry.export}: {len(registry.kernels)} keys, {len(registry.programs)} programs in {registry.root}"
    facts = {"export": registry.export, "keys": len(registry.kernels), "programs": len(registry.programs)}
    return registry, Finding("tree", OK, text, facts)


def _nvrtc(arches: tuple[str, ...]) -> Finding:
    try:
        nvrtc = load_nvrtc()
        facts = {"path": str(nvrtc.path), "version": nvrtc.release, "supported": list(nvrtc.supported)}
    except CompileError as error:
        # with a bundle no compiler is needed
        state = ABSENT if os.environ.get(BUNDLE_VARIABLE) else PROBLEM
        return Finding("nvrtc", state, str(error), {"path": None, "version": None})
    for arch in arches:
        try:
            nvrtc.require(arch)
        except CompileError as error:
            return Finding("nvrtc", PROBLEM, str(error), facts)
    targets = f"; compiles for {', '.join(arches)}" if arches else ""
    return Finding("nvrtc", OK, f"{facts['version']} ({nvrtc.path}){targets}", facts)


def _known_faults(arches: tuple[str, ...]) -> Iterator[Finding]:
    """Each fault that the driver or the compiler here is known to have, for the targets of the programs."""
    versions: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(LaunchError):
        versions["driver"] = driver.driver_version()
    with contextlib.suppress(CompileError):
        versions["nvrtc"] = load_nvrtc().version
    found = [fault for fault in KNOWN_FAULTS for name in versions if fault.applies(name, versions[name], arches)]
    for fault in found:
        major, minor = versions[fault.component]
        text = f"{fault.name} ({fault.component} {major}.{minor}): {fault.symptom}; {fault.remedy}"
        facts = {"name": fault.name, "component": fault.component, "handled": fault.handled, "source": fault.source}
        yield Finding("known fault", OK if fault.handled else PROBLEM, text, facts)
    if not found:
        yield Finding("known fault", OK, f"none of {len(KNOWN_FAULTS)} applies here", {"name": None})


def _cache() -> Finding:
    try:
        root = cache_root()
        entries = read_entries(list_files())
    except CompileError as error:
        return Finding("cache", PROBLEM, str(error), {"path": None})
    damaged = sum(bool(entry.fault) for entry in entries)
    size_bytes = sum(entry.file.size_bytes for entry in entries)
    facts = {"path": str(root), "entries": len(entries), "bytes": size_bytes, "damaged": damaged}
    text = f"{root}: {len(entries)} entries, {size_bytes} bytes"
    refusal = _write_refusal(root)
    if refusal:
        return Finding(
            "cache",
            PROBLEM,
            f"{text}; can't be written ({refusal}), so every process compiles what it lacks. Set {CACHE_VARIABLE}",
            {**facts, "writable": False},
        )
    state = PROBLEM if damaged else OK
    advice = f"; {damaged} damaged, which `cakegen cache verify --remove` removes" if damaged else ""
    return Finding("cache", state, f"{text}{advice}", {**facts, "writable": True})


def _write_refusal(folder: Path) -> str:
    """Why no file can be made in a folder, or in the nearest one above it that exists; empty where one can."""
    # not Path.exists, which raises below a folder that can't be entered
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _settings() -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name.startswith(_PREFIX):
            value = os.environ[name]
            if name in SETTINGS:
                yield Finding("setting", OK, f"{name}={value}", {"name": name, "value": value})
                continue
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there is: {', '.join(SETTINGS)}"
            yield Finding("setting", PROBLEM, f"{name} is no setting of cakegen{hint}", {"name": name, "value": value})
