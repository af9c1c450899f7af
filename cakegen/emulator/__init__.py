"""PTX -> values and a verdict, on a CPU. docs/emulator.md says what is modelled and what is refused."""

from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.backend import EmulatedRunner
from cakegen.emulator.launches.launch import ARITHMETIC, Options, emulate_calls, emulate_plan, load_program, program_of
from cakegen.emulator.launches.stream import LaunchReport
from cakegen.emulator.machine.adversary import SCHEDULES, Adversary

__all__ = [
    "ARITHMETIC",
    "SCHEDULES",
    "Adversary",
    "EmulatedRunner",
    "Fault",
    "LaunchReport",
    "Options",
    "emulate_calls",
    "emulate_plan",
    "load_program",
    "program_of",
]
