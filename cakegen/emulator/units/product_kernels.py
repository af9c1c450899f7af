"""Chains of products as machine code; only `product_chains` imports this, and only where llvmlite is.

What a kernel takes: addresses of bf16 bits in u16, of `[products, rows, 16]` and `[products, n, 16]` indices of them,
and of bytes that say which products start from zero; the first product to do and the one behind the last; the address
of fp32 sums `[rows, n]`, which are written in place; rows and n, which is a multiple of `WIDTH`. It returns the number
of the product that it can't do, or the one behind the last.

The code is written as LLVM IR, since a compiler that infers types takes seconds for what LLVM does in a few hundredths.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numpy.typing import NDArray

Array = NDArray[Any]

DEPTH = 16
# Columns of a sum that are computed together.
WIDTH = 8
_FRACTION_BITS = 25
# Exponents of factors and of accumulators that fit: their products and sums, scaled by what the largest asks for, are
# then normal in fp32. That of a factor of zero is below any other, and no scale is made for less than the smallest.
_FACTORS, _SUMS, _ZERO, _SMALLEST = (-40, 20), (-80, 40), -300, -100

_I8, _I16, _I32, _I64, _F32, _F64 = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType(), ir.DoubleType())
_PARAMETERS = ("elements", "a_at", "b_at", "fresh", "first", "last", "sums", "rows", "n")
_ADDRESSES = {"elements": _I16, "a_at": _I64, "b_at": _I64, "fresh": _I8, "sums": _I32}


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, WIDTH)


class _Writer(ir.IRBuilder):  # type: ignore[misc]  # llvmlite ships no types
    """Writes a function: loops whose counters are memory (LLVM makes registers of them), and values of vectors."""

    def __init__(self, function: Any) -> None:
        super().__init__(function.append_basic_block("entry"))
        self.arguments = dict(zip(_PARAMETERS, function.args, strict=True))

    def constant(self, value: float, like: Any) -> Any:
        """A constant of a value's type, in all its elements."""
        kind = like.type
        return ir.Constant(kind, [value] * WIDTH if isinstance(kind, ir.VectorType) else value)

    def room(self, kind: Any, count: Any) -> Any:
        """Memory for some elements, until the function returns."""
        return self.alloca(kind, count)

    @contextlib.contextmanager
    def loop(self, first: Any, last: Any, step: int = 1) -> Iterator[Any]:
        """The body runs with a counter from `first` up to `last`, which it may not reach."""
        with self.goto_entry_block():
            counter = self.alloca(_I64)
        self.store(first, counter)
        head, body, end = (self.append_basic_block(name) for name in ("head", "body", "end"))
        self.branch(head)
        self.position_at_end(head)
        at = self.load(counter)
        self.cbranch(self.icmp_signed("<", at, last), body, end)
        self.position_at_end(body)
        yield at
        self.store(self.add(at, ir.Constant(_I64, step)), counter)
        self.branch(head)
        self.position_at_end(end)

    def read(self, address: Any, *at: Any) -> Any:
        """The element at a sum of indices."""
        return self.load(self.gep(address, [functools.reduce(self.add, at)]))

    def read_vector(self, address: Any, at: Any) -> Any:
        """The elements from an index on."""
        place = self.gep(address, [at])
        kind = _vector(place.type.pointee)
        return self.load(self.bitcast(place, kind.as_pointer()), align=4)

    def write_vector(self, value: Any, address: Any, at: Any) -> None:
        """Likewise."""
        self.store(value, self.bitcast(self.gep(address, [at]), value.type.as_pointer()), align=4)

    def spread(self, value: Any) -> Any:
        """A vector of equal elements."""
        kind = _vector(value.type)
        single = self.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
        return self.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(_vector(_I32), [0] * WIDTH))

    def larger(self, a: Any, b: Any) -> Any:
        """The maximum of signed integers."""
        return self.select(self.icmp_signed(">", a, b), a, b)

    def exponent(self, field: Any) -> Any:
        """Unbiased, of the eight bits; a subnormal counts as the smallest normal."""
        return self.sub(self.larger(field, self.constant(1, field)), self.constant(127, field))

    def within(self, exponent: Any, limits: tuple[int, int]) -> Any:
        """Whether an exponent lies between two limits, which count as within."""
        low, high = limits
        shifted = self.sub(exponent, self.constant(low, exponent))
        return self.icmp_unsigned("<=", shifted, self.constant(high - low, exponent))


def _bf16(write: _Writer, elements: Any, at: Any) -> Any:
    """The bits of an element, in i32 and shifted to those of fp32."""
    return write.shl(write.zext(write.load(write.gep(elements, [at])), _I32), ir.Constant(_I32, 16))


def _unpack_factor(write: _Writer, word: Any, values: Any, exponents: Any, at: Any, wide: Any) -> None:
    """One factor's value and exponent, and into `wide` whether it is too large or small."""
    magnitude = write.and_(word, ir.Constant(_I32, 0x7FFFFFFF))
    exponent = write.exponent(write.lshr(magnitude, ir.Constant(_I32, 23)))
    is_zero = write.icmp_signed("==", magnitude, ir.Constant(_I32, 0))
    write.store(write.bitcast(word, _F32), write.gep(values, [at]))
    write.store(write.select(is_zero, ir.Constant(_I32, _ZERO), exponent), write.gep(exponents, [at]))
    fits = write.or_(is_zero, write.within(exponent, _FACTORS))
    write.store(write.or_(write.load(wide), write.zext(write.not_(fits), _I32)), wide)


def _check_sums(write: _Writer, sums: Any, size: Any, wide: Any) -> None:
    with write.loop(ir.Constant(_I64, 0), size, WIDTH) as at:
        magnitude = write.and_(words := write.read_vector(sums, at), write.constant(0x7FFFFFFF, words))
        exponent = write.exponent(write.lshr(magnitude, write.constant(23, magnitude)))
        is_zero = write.icmp_signed("==", magnitude, write.constant(0, magnitude))
        fits = write.or_(is_zero, write.within(exponent, _SUMS))
        beyond = write.bitcast(write.not_(fits), ir.IntType(WIDTH))
        write.store(write.or_(write.load(wide), write.zext(beyond, _I32)), wide)


def _clear(write: _Writer, sums: Any, size: Any, fresh: Any, product: Any) -> None:
    """A product that starts from zero."""
    starts = write.icmp_signed("!=", write.read(fresh, product), ir.Constant(_I8, 0))
    with write.if_then(starts), write.loop(ir.Constant(_I64, 0), size, WIDTH) as at:
        write.write_vector(ir.Constant(_vector(_I32), [0] * WIDTH), sums, at)


def _sum_terms(write: _Writer, a: tuple[Any, Any], b: tuple[Any, Any], places: Any, words: Any) -> tuple[Any, Any]:
    """Terms cut at 25 fractional bits of the largest exponent, in i32 (16 are below 2^31); and that exponent."""
    magnitude = write.and_(words, write.constant(0x7FFFFFFF, words))
    largest = write.exponent(write.lshr(magnitude, write.constant(23, words)))
    for k in range(DEPTH):
        a_at, b_at = places(k)
        exponent = write.add(write.spread(write.read(a[1], a_at)), write.read_vector(b[1], b_at))
        largest = write.larger(largest, exponent)
    # where all terms are zero, any scale will do
    largest = write.larger(largest, write.constant(_SMALLEST, largest))
    scale = _power(write, write.sub(write.constant(_FRACTION_BITS, largest), largest))
    total = ir.Constant(largest.type, [0] * WIDTH)
    for k in range(DEPTH):
        a_at, b_at = places(k)
        # every step is exact: fp32 holds a product's 16 bits, and the conversion truncates
        product = write.fmul(write.spread(write.read(a[0], a_at)), write.read_vector(b[0], b_at))
        total = write.add(total, write.fptosi(write.fmul(product, scale), total.type))
    kept = write.fptosi(write.fmul(write.bitcast(words, scale.type), scale), total.type)
    doubles = _vector(_F64)
    return write.fadd(write.sitofp(total, doubles), write.sitofp(kept, doubles)), largest


def _power(write: _Writer, exponent: Any) -> Any:
    """fp32 powers of two."""
    bits = write.shl(write.add(exponent, write.constant(127, exponent)), write.constant(23, exponent))
    return write.bitcast(bits, _vector(_F32))


def _truncated(write: _Writer, value: Any) -> Any:
    """The bits of fp64 values cut to fp32."""
    nearest = write.fptrunc(value, _vector(_F32))
    back = write.fpext(nearest, value.type)
    size, back_size = (_magnitude(write, each) for each in (value, back))
    words = write.bitcast(nearest, _vector(_I32))
    # one ulp towards zero is one less in the bits of either sign
    return write.sub(words, write.zext(write.fcmp_ordered(">", back_size, size), words.type))


def _magnitude(write: _Writer, value: Any) -> Any:
    bits = write.bitcast(value, _vector(_I64))
    return write.bitcast(write.and_(bits, write.constant((1 << 63) - 1, bits)), value.type)


def _write_hopper(function: Any) -> None:
    """`multiply_add_hopper` of operands whose exponents are small; it stops at any other."""
    write = _Writer(function)
    given = write.arguments
    zero, depth = ir.Constant(_I64, 0), ir.Constant(_I64, DEPTH)
    rows, n, sums = given["rows"], given["n"], given["sums"]
    a_size, b_size, size = write.mul(rows, depth), write.mul(n, depth), write.mul(rows, n)
    a, b = ((write.room(_F32, count), write.room(_I32, count)) for count in (a_size, b_size))
    wide = write.room(_I32, None)
    with write.loop(given["first"], given["last"]) as product:
        _clear(write, sums, size, given["fresh"], product)
        write.store(ir.Constant(_I32, 0), wide)
        with write.loop(zero, a_size) as at:
            place = write.read(given["a_at"], write.mul(product, a_size), at)
            _unpack_factor(write, _bf16(write, given["elements"], place), *a, at, wide)
        with write.loop(zero, n) as column, write.loop(zero, depth) as k:
            place = write.read(given["b_at"], write.mul(product, b_size), write.mul(column, depth), k)
            to = write.add(write.mul(k, n), column)
            _unpack_factor(write, _bf16(write, given["elements"], place), *b, to, wide)
        _check_sums(write, sums, size, wide)
        with write.if_then(write.icmp_signed("!=", write.load(wide), ir.Constant(_I32, 0)), likely=False):
            write.ret(product)
        with write.loop(zero, rows) as row, write.loop(zero, n, WIDTH) as column:
            at = write.add(write.mul(row, n), column)

            def places(k: int, row: Any = row, column: Any = column) -> tuple[Any, Any]:
                a_at = write.add(write.mul(row, depth), ir.Constant(_I64, k))
                return a_at, write.add(write.mul(ir.Constant(_I64, k), n), column)

            total, largest = _sum_terms(write, a, b, places, write.read_vector(sums, at))
            unit = _power(write, write.sub(largest, write.constant(_FRACTION_BITS, largest)))
            value = write.fmul(total, write.fpext(unit, total.type))
            write.write_vector(_truncated(write, value), sums, at)
    write.ret(given["last"])


def _write_wide(function: Any) -> None:
    """`multiply_add_wide`; terms are added in the order of k."""
    write = _Writer(function)
    given = write.arguments
    zero, depth = ir.Constant(_I64, 0), ir.Constant(_I64, DEPTH)
    rows, n, sums = given["rows"], given["n"], given["sums"]
    a_size, b_size, size = write.mul(rows, depth), write.mul(n, depth), write.mul(rows, n)
    a, b = (write.room(_F64, count) for count in (a_size, b_size))
    with write.loop(given["first"], given["last"]) as product:
        _clear(write, sums, size, given["fresh"], product)
        with write.loop(zero, a_size) as at:
            place = write.read(given["a_at"], write.mul(product, a_size), at)
            _widen(write, given["elements"], place, a, at)
        with write.loop(zero, n) as column, write.loop(zero, depth) as k:
            place = write.read(given["b_at"], write.mul(product, b_size), write.mul(column, depth), k)
            _widen(write, given["elements"], place, b, write.add(write.mul(k, n), column))
        with write.loop(zero, rows) as row, write.loop(zero, n, WIDTH) as column:
            at = write.add(write.mul(row, n), column)
            total = ir.Constant(_vector(_F64), [0.0] * WIDTH)
            for k in range(DEPTH):
                k_at = ir.Constant(_I64, k)
                factor = write.spread(write.read(a, write.mul(row, depth), k_at))
                others = write.read_vector(b, write.add(write.mul(k_at, n), column))
                total = write.fadd(total, write.fmul(factor, others))
            before = write.bitcast(write.read_vector(sums, at), _vector(_F32))
            after = write.fptrunc(write.fadd(total, write.fpext(before, total.type)), before.type)
            write.write_vector(write.bitcast(after, _vector(_I32)), sums, at)
    write.ret(given["last"])


def _widen(write: _Writer, elements: Any, place: Any, values: Any, at: Any) -> None:
    single = write.bitcast(_bf16(write, elements, place), _F32)
    write.store(write.fpext(single, _F64), write.gep(values, [at]))


_WRITERS = {"hopper": _write_hopper, "wide": _write_wide}


# Array -> (itself, its address): asking numpy takes as long as a small product does.
_addresses: dict[int, tuple[weakref.ref[Array], int]] = {}


def _address(array: Array, kind: str) -> int:
    """Where an array starts that is used again and again; its type and its layout are checked once."""
    known = _addresses.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    assert array.flags.c_contiguous
    assert array.dtype.str[1:] == kind
    key = id(array)
    _addresses[key] = weakref.ref(array, lambda _: _addresses.pop(key, None)), array.ctypes.data
    return _addresses[key][1]


class Kernel:
    """Machine code of an arithmetic.

    Parameters
    ----------
    name
        `hopper` or `wide`.
    """

    def __init__(self, name: str) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        features = llvm.get_host_cpu_features().flatten()
        machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)
        module = ir.Module(name)
        kinds = [_ADDRESSES[each].as_pointer() if each in _ADDRESSES else _I64 for each in _PARAMETERS]
        _WRITERS[name](ir.Function(module, ir.FunctionType(_I64, kinds), name))
        parsed = llvm.parse_assembly(str(module))
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(parsed, builder)
        # it owns the code
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(_PARAMETERS))
        self._run = prototype(self._engine.get_function_address(name))

    def __call__(
        self, elements: Array, a_at: Array, b_at: Array, fresh: Array, first: int, last: int, sums: Array
    ) -> int:
        """Add products to sums, which are written; the number of the first that it can't do, or `last`."""
        rows, n = sums.shape
        where = _address(elements, "u2"), _address(a_at, "i8"), _address(b_at, "i8"), _address(fresh, "b1")
        done: int = self._run(*where, first, last, sums.ctypes.data, rows, n)
        return done


@functools.cache
def compiled(name: str) -> Kernel:
    """The kernel of a name."""
    return Kernel(name)
