"""Numbers that lie side by side in one register of the processor, for code that numba compiles.

LLVM makes one instruction of each operation where the processor has it, and correct code elsewhere. Addresses are
int64. Nothing here checks them.

numba keeps what it compiled of `loops`, and looks at the date of that file alone: after a change here, delete
``__pycache__/loops*.nb?`` beside it.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16  # bytes that are read at once
HALF = LANES // 2
_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


class _Lanes(types.Type):
    """So many int32 in one register."""

    def __init__(self, count):
        self.count = count
        super().__init__(name=f"Lanes{count}")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, ir.VectorType(_I32, lanes.count))


_sixteen, _eight = _Lanes(LANES), _Lanes(HALF)


def _load(builder, address, item, count):
    return builder.load(builder.inttoptr(address, ir.VectorType(item, count).as_pointer()), align=1)


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _pick(builder, vector, lanes):
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _spread(builder, number, count):
    empty = ir.Constant(ir.VectorType(number.type, 1), ir.Undefined)
    return _pick(builder, builder.insert_element(empty, number, ir.Constant(_I32, 0)), [0] * count)


def _as_bytes(builder, sums, shift, count):
    """Shift sums, and keep them from 0 to 255; int32."""
    value = builder.ashr(sums, _spread(builder, shift, count))
    for sign, edge in (("<", 0), (">", 255)):
        limit = ir.Constant(value.type, [edge] * count)
        value = builder.select(builder.icmp_signed(sign, value, limit), limit, value)
    return value


def _spreader(lanes):
    """Return the intrinsic that repeats a number in all lanes."""

    def spread(context, number):
        def code(target, builder, signature, arguments):
            return _spread(builder, arguments[0], lanes.count)

        return lanes(types.int32), code

    return intrinsic(spread)


spread16, spread8 = _spreader(_sixteen), _spreader(_eight)


@intrinsic
def add_pairs(context, sums, source, which, weights):
    """Add to each of 8 sums two of the 16 bytes at `source`, of the places at `which`, times the weights there."""

    def code(target, builder, signature, arguments):
        sums, source, which, weights = arguments
        given, places = _load(builder, source, _I8, LANES), _load(builder, which, _I8, LANES)
        picked = ir.Constant(given.type, ir.Undefined)
        for lane in range(LANES):  # LLVM knows this as one shuffle of bytes
            at = ir.Constant(_I32, lane)
            value = builder.extract_element(given, builder.extract_element(places, at))
            picked = builder.insert_element(picked, value, at)
        wide = ir.VectorType(_I32, LANES)
        weights = builder.sext(_load(builder, weights, _I16, LANES), wide)
        products = builder.mul(builder.zext(picked, wide), weights)
        even, odd = (_pick(builder, products, [*range(first, LANES, 2)]) for first in (0, 1))
        return builder.add(sums, builder.add(even, odd))

    return _eight(_eight, types.int64, types.int64, types.int64), code


@intrinsic
def add_row(context, sums, source, weight):
    """Add to each of 16 sums the byte at `source` times `weight`."""

    def code(target, builder, signature, arguments):
        sums, source, weight = arguments
        given = builder.zext(_load(builder, source, _I8, LANES), sums.type)
        return builder.add(sums, builder.mul(given, _spread(builder, builder.sext(weight, _I32), LANES)))

    return _sixteen(_sixteen, types.int64, types.int16), code


def _reader(lanes):
    """Return the intrinsic that reads 16 bytes at an address, in this order."""

    def read(context, source):
        def code(target, builder, signature, arguments):
            given = _pick(builder, _load(builder, arguments[0], _I8, LANES), lanes)
            return builder.zext(given, ir.VectorType(_I32, LANES))

        return _sixteen(types.int64), code

    return intrinsic(read)


read, read_mirrored = _reader([*range(LANES)]), _reader([*range(LANES)][::-1])


def _byte_writer(lanes):
    """Return the intrinsic that writes sums, shifted, as bytes."""

    def write(context, sums, shift, place):
        def code(target, builder, signature, arguments):
            sums, shift, place = arguments
            value = _as_bytes(builder, sums, shift, lanes.count)
            _store(builder, builder.trunc(value, ir.VectorType(_I8, lanes.count)), place)
            return target.get_dummy_value()

        return types.void(lanes, types.int32, types.int64), code

    return intrinsic(write)


write16, write8 = _byte_writer(_sixteen), _byte_writer(_eight)


@intrinsic
def byte(context, source):
    """Return the byte at `source`."""

    def code(target, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _I8.as_pointer()))

    return types.uint8(types.int64), code


def _float_writer(is_fused):
    """Return the intrinsic that writes 16 sums, shifted to bytes, times `scale` plus `offset`, as float32."""

    def write(context, sums, shift, scale, offset, place):
        def code(target, builder, signature, arguments):
            sums, shift, scale, offset, place = arguments
            floats = ir.VectorType(_F32, LANES)
            value = builder.sitofp(_as_bytes(builder, sums, shift, LANES), floats)
            scale, offset = _spread(builder, scale, LANES), _spread(builder, offset, LANES)
            if is_fused:
                kind, name = ir.FunctionType(floats, [floats] * 3), f"llvm.fma.v{LANES}f32"
                fma = cgutils.get_or_insert_function(builder.module, kind, name)
                value = builder.call(fma, [value, scale, offset])
            else:
                value = builder.fadd(builder.fmul(value, scale), offset)
            _store(builder, value, place)
            return target.get_dummy_value()

        return types.void(_sixteen, types.int32, types.float32, types.float32, types.int64), code

    return intrinsic(write)


write_floats, write_fused_floats = _float_writer(False), _float_writer(True)


def _interleaver(item):
    """Return the intrinsic that writes 16 values of each of three rows, `pitch` bytes apart, as pixels."""

    def interleave(context, row, pitch, place):
        def code(target, builder, signature, arguments):
            row, pitch, place = arguments
            rows = [builder.add(row, builder.mul(pitch, ir.Constant(pitch.type, c))) for c in range(3)]
            one, two, three = (_load(builder, at, item, LANES) for at in rows)
            lanes = [*range(2 * LANES)]
            both = builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(_I32, 2 * LANES), lanes))
            third = _pick(builder, three, [*range(LANES)] * 2)
            order = [c * LANES + x for x in range(LANES) for c in range(3)]
            whole = builder.shuffle_vector(both, third, ir.Constant(ir.VectorType(_I32, 3 * LANES), order))
            _store(builder, whole, place)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), code

    return intrinsic(interleave)


interleave_bytes, interleave_floats = _interleaver(_I8), _interleaver(_F32)
