"""Leaf module: frozen facts per GPU architecture. Imports only errors.

Sources: CUDA C++ Programming Guide (compute capabilities), PTX ISA 9.1 section 11.1.2 (targets), and the
vendor's part lists for SM counts.
"""

from dataclasses import dataclass

from cakegen.errors import PlanError

INT32_MAX = 2**31 - 1
"""Largest launch parameter and tensor-map coordinate: both are signed 32-bit (CUDA Driver API, cuTensorMapEncodeTiled;
PTX ISA 9.1, cp.async.bulk.tensor)."""


@dataclass(frozen=True)
class Part:
    """One product: its name and the number of streaming multiprocessors it enables."""

    name: str
    sm_count: int


@dataclass(frozen=True)
class Architecture:
    """What the planner, the emitter and the compiler must know of one compilation target.

    Parameters
    ----------
    name
        The exact target, as NVRTC and ptxas spell it (`sm_90a`).
    family
        Architectures of one family share one program text (`sm90`, `sm100`).
    compute_capability
        What the driver reports for a device of this target.
    max_dynamic_smem_bytes
        Dynamic shared memory that one CTA can opt in to.
    smem_per_sm_bytes
        Shared memory of one SM, 1024 bytes of which each resident CTA spends on the system.
    tensor_memory_cols
        Columns of tensor memory (0: none).
    min_nvrtc
        Oldest NVRTC that is asked for: older ones know sm_90a (12.0) and sm_100a (12.8), and spill where it does not.
    parts
        Products that the planner is tested for.
    """

    name: str
    family: str
    compute_capability: tuple[int, int]
    max_dynamic_smem_bytes: int
    smem_per_sm_bytes: int
    tensor_memory_cols: int
    min_nvrtc: tuple[int, int]
    parts: tuple[Part, ...]

    @property
    def key_suffix(self) -> str:
        """Suffix of a logical key: empty for the family whose keys are published, else `@<name>`."""
        return "" if self.family == "sm100" else f"@{self.name}"

    def resident_ctas(self, dynamic_smem_bytes: int) -> int:
        """CTAs of so much dynamic shared memory that an SM's shared memory holds."""
        system_bytes = self.smem_per_sm_bytes - self.max_dynamic_smem_bytes
        return self.smem_per_sm_bytes // (dynamic_smem_bytes + system_bytes)


ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        Architecture(
            name="sm_90a",
            family="sm90",
            compute_capability=(9, 0),
            max_dynamic_smem_bytes=232448,
            smem_per_sm_bytes=233472,
            tensor_memory_cols=0,
            min_nvrtc=(12, 9),
            parts=(Part("H20", 78), Part("H100 PCIe", 114), Part("H100 SXM", 132), Part("H200", 132)),
        ),
        Architecture(
            name="sm_100a",
            family="sm100",
            compute_capability=(10, 0),
            max_dynamic_smem_bytes=232448,
            smem_per_sm_bytes=233472,
            tensor_memory_cols=512,
            min_nvrtc=(12, 9),
            parts=(Part("B200", 148), Part("GB200", 152)),
        ),
        Architecture(
            name="sm_103a",
            family="sm100",
            compute_capability=(10, 3),
            max_dynamic_smem_bytes=232448,
            smem_per_sm_bytes=233472,
            tensor_memory_cols=512,
            min_nvrtc=(12, 9),
            parts=(Part("B300", 148), Part("GB300", 152)),
        ),
    )
}


def architecture(name: str) -> Architecture:
    """The facts of one target.

    Raises
    ------
    PlanError
        The name is not in the table. Names are looked up, never built from parts.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        raise PlanError(f"architecture {name!r} is not supported; supported: {known}") from None


def family_member(family: str) -> Architecture:
    """The first target of a family. All of them share program texts, and so every limit that shapes one."""
    return next(arch for arch in ARCHITECTURES.values() if arch.family == family)


def architecture_of(compute_capability: tuple[int, int]) -> Architecture:
    """The target for a device's compute capability.

    Raises
    ------
    PlanError
        No target covers it.
    """
    for arch in ARCHITECTURES.values():
        if arch.compute_capability == compute_capability:
            return arch
    known = ", ".join(f"{a.compute_capability[0]}.{a.compute_capability[1]} ({a.name})" for a in ARCHITECTURES.values())
    found = f"{compute_capability[0]}.{compute_capability[1]}"
    raise PlanError(f"compute capability {found} is not supported; supported: {known}")
