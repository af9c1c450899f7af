"""Leaf module: the one tree of errors. Imports nothing.

A message says where, what was received, what is needed and why, and what to do.
"""


class CakeError(Exception):
    """Base of every error that cakegen raises on purpose."""


class SpecError(CakeError):
    """A declaration (export file, field, dimension) that can't be honoured."""


class PlanError(CakeError):
    """No route exists for a request, or a plan does not fit its device."""


class EmitError(CakeError):
    """A template or a program specification is wrong."""


class SealError(EmitError):
    """A generated file is not what its export would write."""


class RegistryError(CakeError):
    """A registry module is missing, damaged, or of a schema this version does not know."""


class CompileError(CakeError):
    """The compiler refused a program; the message holds its log."""


class LaunchError(CakeError):
    """An operand, a device or a launch was refused; or a launched program reported a fault."""


class OperandError(LaunchError, ValueError):
    """An operand or an option of a call has a value that the call can't take."""


class OperandKindError(LaunchError, TypeError):
    """An operand or an option of a call is of a wrong kind: no tensor, no whole number, no flag."""


class UnregisteredError(LaunchError, NotImplementedError):
    """A plan needs a program that the export does not hold, since it is not for such a device."""


class EmulationError(CakeError):
    """The emulator met a fault or an instruction it does not model."""


class PtxError(EmulationError):
    """A PTX text that no assembler takes; the message holds the line."""


class LimitError(EmulationError):
    """An emulation was given up at the limit of time that its caller set: neither clean nor at fault."""


class BenchError(CakeError):
    """A measurement can't be made, or a file of results can't be read."""


class ReviewError(CakeError):
    """Two trees can't be compared: a revision, a repository or a file of theirs can't be read."""
