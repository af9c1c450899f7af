"""PTX -> values and a verdict, on a CPU. docs/emulator.md says what is modelled and what is refused."""

from cakegen.emulator.adversary import SCHEDULES, Adversary
from cakegen.emulator.faults import Fault
from cakegen.emulator.launch import ARITHMETIC, Options, emulate_calls, emulate_plan, load_program, program_of
from cakegen.emulator.stream import LaunchReport

__all__ = [
    "ARITHMETIC",
    "SCHEDULES",
    "Adversary",
    "Fault",
    "LaunchReport",
    "Options",
    "emulate_calls",
    "emulate_plan",
    "load_program",
    "program_of",
]
