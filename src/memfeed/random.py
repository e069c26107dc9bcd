"""Draw random numbers by key: the numbers of a row depend on its key alone.

A generator with a state gives a row other numbers when the batch size, the number of ranks or the point of resumption
changes. Here a number is a hash of its key (seed, epoch, row, occurrence, stream, draw), so it never changes. Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011,
https://doi.org/10.1145/2063384.2063405), introduced such counter-based generators.

The hash is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014, https://doi.org/10.1145/2660193.2660195) with the constants "Mix13" of David Stafford ("Better bit mixing",
2011, https://zimbry.blogspot.com/2011/09/better-bit-mixing-improving-on.html). It is applied first to the row and the
occurrence, once for all draws of a batch, and then to the result plus the draw. 64 bits of BLAKE2b (RFC 7693) of seed
and epoch are added before the first, of seed, epoch and stream before the second. Tests pin literal values, because a
change would break resumed runs.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError

_MASK = (1 << 64) - 1
_DRAW_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
# odd, so that two occurrences never give one state; the multiplier is from Steele and Vigna, "Computationally easy,
# spectrally good multipliers for congruential pseudorandom number generators" (2021), https://arxiv.org/abs/2001.05304
_OCCURRENCE_STEP = np.uint64(0xD1342543DE82EF95)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_DOUBLE = np.uint64(11)  # a double in [0, 1) holds 53 of the 64 bits


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of the random numbers of one batch, for `Transform.apply` outside a loader.

    Args:
        seed: any int, negative and huge ones included.
        epoch: any int.
        rows: row numbers in the base store, int64 [k], on the CPU.
        occurrence: an int, or int64 [k], that distinguishes visits of one row in one epoch: 0 under orders that visit
            each row once; the position in the epoch under a sampler that may repeat rows.

    Raises:
        TransformError: rows or occurrence have another dtype, shape or device.
    """

    seed: int
    epoch: int
    rows: torch.Tensor
    occurrence: torch.Tensor | int = 0

    @cached_property
    def states(self) -> NDArray[np.uint64]:
        """The hash of each row and its occurrence, uint64 [k], which all draws of the batch use."""
        rows = self.rows.numpy().view(np.uint64) + np.uint64(derive(self.seed, self.epoch))
        if isinstance(self.occurrence, torch.Tensor):
            return mix(mix(rows) + self.occurrence.numpy().view(np.uint64) * _OCCURRENCE_STEP)
        return mix(mix(rows) + np.uint64((self.occurrence * int(_OCCURRENCE_STEP)) & _MASK))

    @property
    def has_drawn(self) -> bool:
        """True once numbers were drawn for these rows."""
        return "states" in self.__dict__

    def part(self, positions: NDArray[np.int64]) -> Keys:
        """Return the keys of the rows at these positions of `rows`, int64 [m]."""
        index = torch.from_numpy(positions)
        occurrence = self.occurrence[index] if isinstance(self.occurrence, torch.Tensor) else self.occurrence
        part = Keys(self.seed, self.epoch, self.rows[index], occurrence)
        part.__dict__["states"] = self.states[positions]  # saves the cached property from hashing again
        return part

    def __post_init__(self) -> None:
        _check_counter("rows", self.rows)
        if isinstance(self.occurrence, torch.Tensor):
            _check_counter("occurrence", self.occurrence)
            if self.occurrence.shape != self.rows.shape:
                raise TransformError(
                    f"found {len(self.occurrence)} entries of occurrence for {len(self.rows)} rows; "
                    "expected one per row: pass an int if all rows share it"
                )


def uniform(
    keys: Keys, stream: int | str, draws: int = 1, samples: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return random numbers in [0, 1), float64 [k, draws], for the k rows of `keys`, or for those at `samples` [k].

    Entry [i, j] is a pure function of (seed, epoch, rows[i], occurrence[i], stream, j), in every process and on every
    machine. Streams are independent of each other; an int and the str of its digits are different streams.

    >>> keys = Keys(seed=0, epoch=0, rows=torch.tensor([7, 8]))
    >>> bool((uniform(keys, "flip")[1] == uniform(Keys(0, 0, torch.tensor([8])), "flip")[0]).all())
    True
    """
    states = keys.states if samples is None else keys.states[samples]
    bits = mix(states[:, None] + _draw_keys(keys.seed, keys.epoch, stream, draws))
    bits >>= _TO_DOUBLE
    numbers = bits.astype(np.float64)
    numbers *= 2.0**-53
    return numbers


def uniform_streams(keys: Keys, draws: tuple[tuple[int | str, int], ...]) -> dict[int | str, NDArray[np.float64]]:
    """Return by stream what `uniform` returns, for several streams and their numbers of draws, in one pass."""
    counts = [count for _, count in draws]
    # the draws of a sample apart
    bits = mix(_draw_keys_of_streams(keys.seed, keys.epoch, draws)[:, None] + keys.states)
    bits >>= _TO_DOUBLE
    numbers = bits.astype(np.float64)
    numbers *= 2.0**-53
    ends = np.cumsum(counts).tolist()
    return {stream: numbers[end - count : end].T for (stream, count), end in zip(draws, ends, strict=True)}


def derive(*parts: int | str) -> int:
    """Hash ints (of any size and sign) and strs, in their order, to an int in [0, 2**64), with BLAKE2b.

    The pairs (42, 1) and (43, 0) of seed and epoch get different numbers; `seed + epoch` would give both the same.

    >>> derive(42, 1) == derive(43, 0)
    False
    """
    return int.from_bytes(_digest(parts, 8), "little")


@lru_cache(4096, typed=True)
def _draw_keys(seed: int, epoch: int, stream: int | str, draws: int) -> NDArray[np.uint64]:
    """Return the hash of seed, epoch and stream, plus a multiple of SplitMix64's step for each draw, uint64 [draws]."""
    first = derive(seed, epoch, stream)
    return np.array([(first + j * _DRAW_STEP) & _MASK for j in range(draws)], np.uint64)


@lru_cache(64, typed=True)
def _draw_keys_of_streams(seed: int, epoch: int, draws: tuple[tuple[int | str, int], ...]) -> NDArray[np.uint64]:
    return np.concatenate([_draw_keys(seed, epoch, stream, count) for stream, count in draws])


def _digest(parts: tuple[int | str, ...], size: int) -> bytes:
    """Return BLAKE2b of the parts, each with its type and length, so that ("a", "b") differs from ("ab",)."""
    hasher = hashlib.blake2b(digest_size=size)
    for part in parts:
        if isinstance(part, str):
            tag, data = b"s", part.encode("utf-8", "surrogatepass")
        else:
            number = operator.index(part)
            tag, data = b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
        hasher.update(tag + len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply Stafford's Mix13 to uint64 in place, and return it.

    Flipping a bit of the input flips each bit of the output with probability 1/2.
    """
    bits ^= bits >> _SHIFTS[0]
    bits *= _MULTIPLIERS[0]
    bits ^= bits >> _SHIFTS[1]
    bits *= _MULTIPLIERS[1]
    bits ^= bits >> _SHIFTS[2]
    return bits


def mix_signed(bits: torch.Tensor) -> torch.Tensor:
    """Do what `mix` does with the bits of int64, on any device. Return a new tensor."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        high = bits >> int(shift)
        high &= (1 << (64 - int(shift))) - 1  # torch shifts the sign in
        bits = bits ^ high
        if multiplier is not None:
            bits *= _signed(int(multiplier))
    return bits


def _signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


DRAW_STEP_SIGNED = _signed(_DRAW_STEP)


def _check_counter(name: str, counter: torch.Tensor) -> None:
    if counter.dtype != torch.int64 or counter.ndim != 1 or counter.device.type != "cpu":
        raise TransformError(
            f"found {name} of {counter.dtype} {list(counter.shape)} on {counter.device}; "
            f"expected int64 [k] on the CPU: convert it with {name}.to('cpu', torch.int64).reshape(-1)"
        )
