"""Where and when a run was made: device, versions, commit, clocks. Imports torch, compile's NVRTC and runtime's driver.

Whatever can't be read is recorded as the reason why.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
from typing import Any

import torch

import cakegen
from cakegen.compile import load_nvrtc
from cakegen.errors import CakeError
from cakegen.runtime import driver
from cakegen.version import COMMIT_VARIABLE, find_commit

_SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit",
    "temperature.gpu", "pstate",
)  # fmt: skip
_SECONDS = 20


def read_provenance(device: torch.device) -> dict[str, Any]:
    """What the first line of a file of results holds."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "sm_count": torch.cuda.get_device_properties(device).multi_processor_count if _is_cuda(device) else None,
        "l2_bytes": torch.cuda.get_device_properties(device).L2_cache_size if _is_cuda(device) else None,
        "driver": _attempt(driver.versions),
        "nvrtc": _attempt(lambda: load_nvrtc().release),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cakegen": cakegen.__version__,
        "commit": read_commit(),
        "clocks": read_clocks(device),
    }


def device_name(device: torch.device) -> str:
    """The device as its driver calls it."""
    return torch.cuda.get_device_name(device) if _is_cuda(device) else str(device)


def read_commit() -> str:
    """`CAKEGEN_COMMIT`, else what git or the installed package says; with `+` where it was changed."""
    return find_commit() or f"unknown (no git checkout; set {COMMIT_VARIABLE})"


def read_clocks(device: torch.device) -> dict[str, str]:
    """Clocks (MHz), power (W) and temperature (C) now, as nvidia-smi words them."""
    if not _is_cuda(device):
        return {"unknown": f"{device} is no CUDA device"}
    identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    selected = f"GPU-{identity}" if identity else str(torch.cuda._get_nvml_device_index(device))
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    text = _output("nvidia-smi", query, "--format=csv,noheader,nounits", "-i", selected)
    values = [value.strip() for value in text.split(",")]
    if len(values) != len(_SMI_FIELDS):
        return {"unknown": text}
    return dict(zip(_SMI_FIELDS, values, strict=True))


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _output(*command: str) -> str:
    """What a command prints, or why it printed nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if done.returncode:
        return f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout.strip()


def _attempt(read: Any) -> str:
    try:
        return str(read())
    except CakeError as error:
        return f"unknown ({error})"


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
