"""What this machine can do with cakegen, and what stands in the way. Needs no GPU; creates no context on one."""

from cakegen.doctor.finding import ABSENT, OK, PROBLEM, Finding
from cakegen.doctor.machine import examine_machine
from cakegen.doctor.routes import examine_devices

__all__ = ["ABSENT", "OK", "PROBLEM", "Finding", "examine_devices", "examine_machine"]
