"""A CUDA device simulated on the CPU, to test without a GPU what waits for what, and who frees which memory.

Within ``with simulated() as machine:`` torch has the devices cuda:0 and cuda:1. Their tensors are `DeviceTensor`.

- A stream is a queue. Its work runs as late as possible (only when something waits for it), or, with a seed, at random
  moments.
- The allocator gives memory of a dropped tensor at once to the next request on the same stream, and keeps it as long as
  streams of ``record_stream`` have work that was queued before. Memory is garbage until it is written.
- A device reads page-locked memory when the work runs. To read it after it was unlocked is an error.
- Launches, synchronisations (with the line that made each), waits for events, reserved memory and contexts are counted.
- A CUDA graph can be captured. Calls that break a capture on a real device break it here.

Not simulated: backward on several devices, Triton, timing.
"""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from memfeed.transfer import page_locked

GARBAGE = 0xA5
ROUND_BYTES = 512  # the allocator's unit
CAPTURING = "CUDA error: operation not permitted when stream is capturing"
aten = torch.ops.aten
_machine: Machine


class Event:
    """A position in a stream's queue. ``enable_timing`` and ``blocking`` change nothing."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.stream, self.position = None, 0

    def record(self, stream=None):
        with _machine.lock:
            self.stream = stream or _machine.current_stream()
            self.position = self.stream.queued
            _machine.advance()

    def is_done(self):
        return self.stream is None or self.stream.done >= self.position

    def query(self):
        _machine.touch_current_device("event query")
        return self.is_done()

    def synchronize(self):
        _machine.touch_current_device("event wait")  # torch does not change to the event's device here
        _machine.waits[threading.current_thread().name, _machine.line()] += 1
        if self.stream is not None:
            self.stream.run(self.position)

    def elapsed_time(self, other):
        return float(other.position - self.position)  # of no meaning: nothing here takes time

    def wait(self, stream=None):
        (stream or _machine.current_stream()).wait_event(self)


class Stream:
    """A queue of work. The work ``(event, function)`` waits for ``event`` first, if it is not None."""

    def __init__(self, device=None, priority=0):
        index = _index(device)
        self.device = torch.device("cuda", index)
        self.queue, self.queued, self.done, self.graph = deque(), 0, 0, None
        _machine.devices[index].streams.append(self)

    def push(self, function, event=None):
        with _machine.lock:
            if self.graph is not None:
                if event is not None:
                    _machine.break_capture("the stream waits for work outside of the capture")
                self.graph.work.append(function)
                return
            self.queue.append((event, function))
            self.queued += 1
            _machine.advance()

    def run(self, position=None):
        with _machine.lock, _disable_current_modes(), torch.no_grad():
            while self.done < (self.queued if position is None else position):
                event, function = self.queue.popleft()
                if event is not None:
                    event.stream.run(event.position)
                function()
                self.done += 1

    def is_ready(self):
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].is_done())

    def wait_event(self, event):
        if event.stream is not None:
            copied = Event()  # the event as it is now: it may be recorded again
            copied.stream, copied.position = event.stream, event.position
            self.push(lambda: None, copied)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        _machine.synchronize("stream", [self])

    def query(self):
        return self.done == self.queued


class Block:
    """Memory of a device. ``array`` is a weak reference to the memory as its present user holds it."""

    def __init__(self, nbytes, device, stream):
        self.memory = torch.from_numpy(np.full(nbytes, GARBAGE, np.uint8))
        self.address, self.nbytes, self.device, self.stream = self.memory.data_ptr(), nbytes, device, stream
        self.other_streams, self.array, self.is_of_graph = set(), None, False


class HostRange:
    """Page-locked memory of the CPU. ``uses`` are the positions of queues at which torch knows it is read."""

    def __init__(self, address, nbytes, owner=None):
        self.address, self.nbytes, self.owner, self.uses = address, nbytes, owner, []

    def holds(self, address):
        return self.address <= address < self.address + self.nbytes


class Device:
    """The memory and the counters of one device."""

    def __init__(self, index, total):
        self.index, self.total, self.limit = index, total, total
        self.streams, self.free, self.waiting = [], [], []
        self.launches, self.allocated, self.reserved, self.peak_reserved = Counter(), 0, 0, 0

    def allocate(self, nbytes):
        machine, stream = _machine, _machine.current_stream(self.index)
        nbytes = -(-max(nbytes, 1) // ROUND_BYTES) * ROUND_BYTES
        with machine.lock, torch.inference_mode(False):
            self.reap()
            fitting = [block for block in self.free if block.stream is stream and nbytes <= block.nbytes <= 2 * nbytes]
            block = min(fitting, key=lambda block: block.nbytes, default=None)
            if block is not None:
                self.free.remove(block)
            else:
                block = self._more(nbytes, stream)
            block.is_of_graph = stream.graph is not None
            block.other_streams = set()
            array = block.memory.numpy()[:]
            block.array = weakref.ref(array, lambda _: self.take_back(block))
            self.allocated += block.nbytes
            memory = block.memory
            stream.push(lambda: memory.fill_(GARBAGE))
            return block, torch.from_numpy(array)

    def _more(self, nbytes, stream):
        if stream.graph is None:
            _machine.unsafe_call("cudaMalloc")
        if self.reserved + nbytes > self.limit:
            self.release_cache()
        if self.reserved + nbytes > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes. (simulated)")
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Block(nbytes, self, stream)

    def take_back(self, block):
        with _machine.lock:
            self.allocated -= block.nbytes
            if not block.is_of_graph:
                ends = [(stream, stream.queued) for stream in block.other_streams]
                self.waiting.append((block, ends))
                self.reap()

    def reap(self):
        for block, ends in self.waiting[:]:
            if all(stream.done >= position for stream, position in ends):
                self.waiting.remove((block, ends))
                self.free.append(block)

    def release_cache(self):
        with _machine.lock:
            self.reap()
            self.reserved -= sum(block.nbytes for block in self.free)
            for block in self.free:
                block.stream.run()  # as cudaFree
            self.free.clear()


class Machine:
    """Two devices, what is page-locked, and what was counted.

    Args:
        seed: of the moments at which work runs; None runs it as late as possible.
        total: bytes of each device's memory.
        locks: the error code of cudaHostRegister; 0 is success.
        pins: whether torch gives page-locked memory.
    """

    def __init__(self, seed=None, total=8 << 30, lock_error=0, pins=True):
        self.lock, self.local = threading.RLock(), threading.local()
        self.random = None if seed is None else random.Random(seed)
        self.lock_error, self.pins = lock_error, pins
        self.registered, self.pinned, self.errors, self.contexts = {}, [], [], set()
        self.syncs, self.waits = Counter(), Counter()
        self.capture, self.syncs_are_errors = None, False
        self.devices = [Device(index, total) for index in range(2)]
        self.defaults = []

    # --- queues

    def current_device(self):
        return getattr(self.local, "device", 0)

    def current_stream(self, device=None):
        index = self.current_device() if device is None else _index(device)
        return getattr(self.local, "streams", {}).get(index, self.defaults[index])

    def advance(self):
        """Run some work that is ready, if the schedule is random."""
        if self.random is None:
            return
        streams = [stream for device in self.devices for stream in device.streams]
        for _ in range(self.random.randrange(3)):
            stream = self.random.choice(streams)
            if stream.is_ready():
                stream.run(stream.done + 1)

    def launch(self, name, device, function):
        self.contexts.add(device.index)
        device.launches[name] += 1
        self.current_stream(device.index).push(function)

    def set_sync_debug_mode(self, mode):
        self.syncs_are_errors = mode == "error"

    def synchronize(self, kind, streams):
        self.unsafe_call(kind)
        if self.syncs_are_errors:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.syncs[kind, self.line()] += 1
        for stream in streams:
            stream.run()

    @staticmethod
    def line():
        """Return the lines of the project that are running now, the newest first."""
        frames = [f for f in traceback.extract_stack(limit=50) if "/memfeed/" in f.filename or "/test_" in f.filename]
        return " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in frames[:-4:-1])

    def touch_current_device(self, name):
        self.contexts.add(self.current_device())
        self.unsafe_call(name)

    # --- captures

    def unsafe_call(self, name):
        """Break a capture that forbids this call in the calling thread, and raise as CUDA does."""
        capture = self.capture
        own = capture is not None and capture.thread is threading.current_thread()
        other = capture is not None and capture.mode == "global"
        other = other and threading.current_thread().name != "memfeed page-locked memory"  # its captures are relaxed
        if own or other:
            self.break_capture(name)

    def break_capture(self, name):
        self.capture.broken_by.append(f"{name} at {self.line()}")
        raise RuntimeError(CAPTURING)

    # --- memory of the CPU

    def host_range(self, address):
        """Return the page-locked memory at an address, or None."""
        ranges = [*self.registered.values(), *self.pinned]
        return next((one for one in ranges if one.holds(address)), None)

    def pin(self, nbytes):
        """Return page-locked memory of torch; it is used again after the copies queued from it."""
        if not self.pins:
            raise RuntimeError("CUDA error: operation not supported")
        self.contexts.add(self.current_device())
        with self.lock, torch.inference_mode(False):
            memory = np.full(max(nbytes, 1), GARBAGE, np.uint8)
            held = HostRange(memory.ctypes.data, memory.size, memory)
            self.pinned.append(held)
            array = memory[:]
            weakref.finalize(array, self._unpin, held).atexit = False
            return torch.from_numpy(array)[:nbytes]

    def _unpin(self, held):
        def free():
            held.owner[:] = GARBAGE  # as another user of it does
            self.pinned.remove(held)

        # free when the copies are done: after the last one that is not done yet
        waiting = [(stream, position) for stream, position in held.uses if stream.done < position]
        if not waiting:
            free()
            return
        last = [len(waiting)]

        def one_done():
            last[0] -= 1
            if not last[0]:
                free()

        for stream, position in waiting:
            at = len(stream.queue) - (stream.queued - position) - 1
            event, function = stream.queue[at]
            stream.queue[at] = (event, _both(function, one_done))

    def read_locked(self, address, shape, stride, dtype):
        """Return page-locked memory as the device sees it now."""
        if self.host_range(address) is None:
            self.errors.append(f"a device read memory at {address:#x} after it was unlocked")
            return torch.full(tuple(shape), 0, dtype=dtype)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        buffer = (ctypes.c_ubyte * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).as_strided(shape, stride)


def _both(first, second):
    def run():
        first()
        second()

    return run


def _index(device):
    if device is None:
        return _machine.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _machine.current_device() if index is None else index


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a simulated device. ``inner`` is its memory, ``home`` a Block, or what holds it."""

    @staticmethod
    def __new__(cls, inner, home, index):
        made = torch.Tensor._make_wrapper_subclass(
            cls, tuple(inner.shape), strides=inner.stride(), dtype=inner.dtype, device=torch.device("cuda", index)
        )
        made.inner, made.home, made.index = inner, home, index
        return made

    def record_stream(self, stream):
        with _machine.lock:
            if isinstance(self.home, Block) and stream is not self.home.stream:
                self.home.other_streams.add(stream)

    def tolist(self):
        return self.cpu().tolist()

    def as_subclass(self, cls):
        return self  # a tensor on a real device is a plain one

    def __repr__(self):
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.index})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.data_ptr:
            return args[0].inner.data_ptr()
        if func is torch.Tensor.untyped_storage:
            return args[0].inner.untyped_storage()
        if func is torch.Tensor.record_stream:
            return DeviceTensor.record_stream(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if any(issubclass(one, torch.Tensor) and one not in (cls, torch.Tensor) for one in types):
            return NotImplemented  # of a nested tensor: it asks for its parts
        return dispatch(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sends what makes tensors on a device, and every other operation, through `dispatch`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(one not in (DeviceTensor, torch.Tensor, torch.nn.Parameter) for one in types):
            return func(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {})


def new_tensor(index, shape, dtype, strides=None):
    """Return a tensor of a device, full of garbage, in memory for its current stream."""
    device = _machine.devices[index]
    _machine.contexts.add(index)
    shape = tuple(shape)
    strides = tuple(strides) if strides is not None else torch.empty(shape, dtype=dtype, device="meta").stride()
    count = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if not count:
        return DeviceTensor(torch.empty_strided(shape, strides, dtype=dtype), None, index)
    block, memory = device.allocate(count * dtype.itemsize)
    inner = memory[: count * dtype.itemsize].view(dtype).as_strided(shape, strides)
    return DeviceTensor(inner, block, index)


def reference(tensor):
    """Return a function that gives the memory of a tensor when work runs. It keeps no memory alive."""
    inner = tensor.inner if isinstance(tensor, DeviceTensor) else tensor
    shape, stride, dtype, address = tuple(inner.shape), inner.stride(), inner.dtype, inner.data_ptr()
    if not inner.numel():
        return lambda: torch.empty_strided(shape, stride, dtype=dtype)
    if isinstance(tensor, DeviceTensor) and isinstance(tensor.home, Block):
        memory, offset = tensor.home.memory, address - tensor.home.address

        def of_device():
            usable = (len(memory) - offset) // dtype.itemsize * dtype.itemsize
            return memory[offset : offset + usable].view(dtype).as_strided(shape, stride)

        return of_device
    machine = _machine
    if isinstance(tensor, DeviceTensor) or machine.host_range(address) is not None:
        return lambda: machine.read_locked(address, shape, stride, dtype)
    copied = inner.clone()  # pageable memory
    return lambda: copied


def _cuda_index(device):
    return None if device is None or torch.device(device).type != "cuda" else _index(device)


def _launch(index, func, args, kwargs, outputs):
    """Queue ``func``, whose results go into ``outputs``; it writes its arguments if there are none."""

    class Later(SimpleNamespace):
        pass

    def later(value):
        return Later(read=reference(value)) if isinstance(value, torch.Tensor) else value

    def now(value):
        return value.read() if isinstance(value, Later) else value

    arguments, options = tree_map(later, list(args)), tree_map(later, dict(kwargs))
    written = [reference(tensor) for tensor in outputs]

    def work():
        result = func(*tree_map(now, arguments), **tree_map(now, options))
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for target, source in zip(written, found, strict=False):
            target().copy_(source)

    _machine.launch(str(func).removesuffix(".default"), _machine.devices[index], work)


_NEEDS_VALUES = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default,
    aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor, aten.allclose.default,
}  # fmt: skip
_EMPTY = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_VIEWS = {
    aten.detach.default, aten.alias.default, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
}  # fmt: skip


def _inner(value):
    return value.inner if isinstance(value, DeviceTensor) else value


def _on_cpu(func, args, kwargs):
    if func is aten.is_pinned.default:
        return bool(args[0].numel()) and _machine.host_range(args[0].data_ptr()) is not None
    if func is aten._pin_memory.default:
        made = _machine.pin(args[0].nbytes).view(args[0].dtype).view(args[0].shape)
        return made.copy_(args[0])
    if kwargs.pop("pin_memory", None):
        like = func(*args, **{**kwargs, "device": torch.device("meta")})
        return _machine.pin(like.nbytes).view(like.dtype).view(like.shape)
    return func(*args, **kwargs)


@cache
def _is_composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def dispatch(func, args, kwargs):
    """Do an operation: on the CPU at once, on a device later."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    asked = _cuda_index(kwargs.get("device"))
    if not on_device and asked is None:
        return _on_cpu(func, args, dict(kwargs))
    if _is_composite(func):  # reaches this point only from within another tensor class
        return func.decompose(*args, **kwargs)
    with _machine.lock:
        return _on_device(func, args, dict(kwargs), tensors, on_device, asked)


def _on_device(func, args, kwargs, tensors, on_device, asked):
    index = asked if asked is not None else on_device[0].index
    if func is aten._to_copy.default:
        return _to_copy(args[0], kwargs, asked)
    if func is aten.copy_.default:
        return _copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
    if func in _NEEDS_VALUES or (func is aten.index.Tensor and _has_mask(args[1])):
        _machine.synchronize(str(func), [_machine.current_stream(index)])
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return tree_map(lambda value: _copied(value, index) if isinstance(value, torch.Tensor) else value, result)
    if func.is_view or func in _VIEWS:
        home = on_device[0].home
        result = func(*tree_map(_inner, list(args)), **tree_map(_inner, kwargs))
        return tree_map(
            lambda value: DeviceTensor(value, home, index) if isinstance(value, torch.Tensor) else value, result
        )
    others = {tensor.index for tensor in on_device}
    others |= {"cpu" for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim()}
    if func is aten.index.Tensor and "cpu" in others:
        moved = [
            _copied(one, index) if isinstance(one, torch.Tensor) and one.device.type == "cpu" else one
            for one in args[1]
        ]
        _machine.synchronize("index on the CPU", [_machine.current_stream(index)])
        return dispatch(func, (args[0], moved), kwargs)
    if len(others) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two: {others} ({func})")
    kwargs.pop("pin_memory", None)
    options = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
    if func._schema.is_mutable:
        _launch(index, func, args, options, [])
        return kwargs["out"] if "out" in kwargs else args[0]
    if func in _EMPTY:
        like = func(*tree_map(_inner, args), **options)
        return new_tensor(index, like.shape, like.dtype, like.stride())
    outputs = []

    def make(value):
        if not isinstance(value, torch.Tensor):
            return value
        outputs.append(new_tensor(index, value.shape, value.dtype, value.stride()))
        return outputs[-1]

    on_meta = {name: torch.device("meta") if name == "device" else value for name, value in kwargs.items()}
    made = tree_map(make, func(*tree_map(_meta, list(args)), **tree_map(_meta, on_meta)))
    _launch(index, func, args, options, outputs)
    return made


def _has_mask(indices):
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _meta(value):
    if not isinstance(value, torch.Tensor) or (not isinstance(value, DeviceTensor) and not value.dim()):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _copied(value, index):
    made = new_tensor(index, value.shape, value.dtype, value.stride())
    memory = made.inner
    _machine.current_stream(index).run()
    memory.copy_(value)
    return made


def _to_copy(source, kwargs, asked):
    target = kwargs.get("device")
    index = asked if target is not None else source.index
    like = torch.empty_like(
        _meta(source) if isinstance(source, DeviceTensor) or source.dim() else source,
        dtype=kwargs.get("dtype") or source.dtype,
        device="meta",
        memory_format=kwargs.get("memory_format") or torch.preserve_format,
    )
    if index is not None:
        made = new_tensor(index, like.shape, like.dtype, like.stride())
    else:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return _copy(made, source, kwargs.get("non_blocking", False))


def _copy(target, source, non_blocking):
    """Copy as torch does: from and to pageable memory the CPU waits."""
    machine = _machine
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        _launch(target.index, aten.copy_.default, (target, source), {}, [])
        if target.index != source.index:  # torch makes the streams of both devices wait for each other
            machine.current_stream(source.index).wait_stream(machine.current_stream(target.index))
        return target
    device = machine.devices[(target if isinstance(target, DeviceTensor) else source).index]
    stream, host = machine.current_stream(device.index), source if isinstance(target, DeviceTensor) else target
    held = machine.host_range(host.data_ptr()) if host.numel() else None
    read, write = reference(source), (reference(target) if isinstance(target, DeviceTensor) else lambda: target)
    is_to_device = isinstance(target, DeviceTensor)
    machine.launch("copy to the device" if is_to_device else "copy to the CPU", device, lambda: write().copy_(read()))
    if held is not None:
        held.uses.append((stream, stream.queued))
    if host.numel() and (held is None or not non_blocking):
        kind = "copy" if not non_blocking else "copy of pageable memory"
        machine.synchronize(f"{kind}, {'to the device' if is_to_device else 'to the CPU'}", [stream])
    return target


# --- what replaces torch.cuda


class _UseDevice:
    def __init__(self, device):
        self._index = _index(device) if not isinstance(device, torch.device) or device.type == "cuda" else None

    def __enter__(self):
        self._before = _machine.current_device()
        if self._index is not None:
            _machine.local.device = self._index

    def __exit__(self, *_):
        _machine.local.device = self._before


class _UseStream:
    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        self._before = _machine.current_device(), getattr(_machine.local, "streams", {})
        if self._stream is not None:
            index = self._stream.device.index
            _machine.local.device = index
            _machine.local.streams = {**self._before[1], index: self._stream}

    def __exit__(self, *_):
        _machine.local.device, _machine.local.streams = self._before
        if self._stream is not None and self._stream.device.index != self._before[0]:
            _machine.contexts.add(self._before[0])  # torch sets the stream of the device before, which makes a context


class Graph:
    """A CUDA graph: the work captured, launched as one."""

    def __init__(self):
        self.work = []

    def replay(self):
        work = list(self.work)

        def run():
            for one in work:
                one()

        device = _machine.devices[_machine.current_device()]
        _machine.launch("graph", device, run)


@contextmanager
def _graph(graph, pool=None, stream=None, capture_error_mode="global"):
    stream = stream or Stream()
    _synchronize()
    gc.collect()
    with _UseStream(stream):
        capture = SimpleNamespace(mode=capture_error_mode, thread=threading.current_thread(), broken_by=[])
        _machine.capture, stream.graph = capture, graph
        try:
            yield
        finally:
            _machine.capture = stream.graph = None
    if capture.broken_by:
        raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {capture.broken_by}")


class _Runtime:
    """The functions of the CUDA runtime that torch.cuda.cudart() has."""

    @staticmethod
    def cudaHostRegister(address, nbytes, flags):  # noqa: N802
        _machine.touch_current_device("cudaHostRegister")
        if _machine.lock_error:
            return _machine.lock_error
        _machine.registered[address] = HostRange(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address):  # noqa: N802
        _machine.touch_current_device("cudaHostUnregister")
        return 0 if _machine.registered.pop(address, None) else 713  # not registered: it outlived its simulation


def _check_error(code):
    if int(code) == 2:
        raise torch.OutOfMemoryError("CUDA error: out of memory")
    if int(code):
        raise RuntimeError(f"CUDA error: operation not supported ({code})")


def _synchronize(device=None):
    with _UseDevice(device):
        _machine.synchronize("device", _machine.devices[_machine.current_device()].streams)


def _from_data(make):
    def made(data, *args, device=None, **kwargs):
        if hasattr(data, "__cuda_array_interface__") and not isinstance(data, torch.Tensor):
            address, nbytes = data.__cuda_array_interface__["data"][0], data.__cuda_array_interface__["shape"][0]
            inner = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
            return DeviceTensor(inner, data, _index(device))
        if isinstance(data, DeviceTensor):
            return data if device is None else data.to(device)
        tensor = make(data, *args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


def _properties(device=None):
    return SimpleNamespace(total_memory=_machine.devices[_index(device)].total)


def _device_value(name):
    return lambda device=None: getattr(_machine.devices[_index(device)], name)


def _memory_info(device=None):
    one = _machine.devices[_index(device)]
    _machine.contexts.add(one.index)
    return one.limit - one.reserved, one.total


def _set_fraction(fraction, device=None):
    one = _machine.devices[_index(device)]
    one.limit = int(one.total * fraction)


def _empty_cache():
    for device in _machine.devices:
        device.release_cache()


def _let_threads_end():
    """Wait for the threads of loaders that are gone: one that is still making a batch would use the next machine."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "memfeed":
            thread.join(2)


@contextmanager
def simulated(seed=None, **options):
    """Within the block torch has two GPUs. Yields the Machine. At its end nothing may be read after it was unlocked."""
    global _machine
    torch._C._ensureCUDADeviceGuardSet()
    machine = _machine = Machine(seed, **options)
    machine.defaults = [Stream(index) for index in range(2)]
    run_thread = threading.Thread.run

    def run_with_mode(thread):
        with _Mode():
            run_thread(thread)

    replaced = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: bool(machine.contexts),
        "Stream": Stream, "Event": Event, "current_stream": machine.current_stream, "stream": _UseStream,
        "default_stream": lambda device=None: machine.defaults[_index(device)], "device": _UseDevice,
        "device_of": lambda tensor: _UseDevice(tensor.device),
        "get_device_name": lambda device=None: "a simulated GPU", "is_bf16_supported": lambda *_: True,
        "device_count": lambda: 2, "current_device": machine.current_device, "set_device": _set_device,
        "mem_get_info": _memory_info, "memory_reserved": _device_value("reserved"),
        "memory_allocated": _device_value("allocated"), "get_device_properties": _properties,
        "set_per_process_memory_fraction": _set_fraction, "empty_cache": _empty_cache, "cudart": _Runtime,
        "set_sync_debug_mode": machine.set_sync_debug_mode,
        "check_error": _check_error, "synchronize": _synchronize, "CUDAGraph": Graph, "graph": _graph,
        "_sleep": lambda cycles: machine.current_stream().push(lambda: None),
    }  # fmt: skip
    before = {(torch.cuda, name): getattr(torch.cuda, name) for name in replaced}
    before |= {(torch, name): getattr(torch, name) for name in ("tensor", "as_tensor")}
    before[threading.Thread, "run"] = run_thread
    try:
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)
        torch.tensor, torch.as_tensor = _from_data(torch.tensor), _from_data(torch.as_tensor)
        threading.Thread.run = run_with_mode
        gc.freeze()  # what was there before need not be searched at the end
        with _Mode():
            yield machine
            gc.collect()
            end = time.monotonic() + 10
            while page_locked._waiting and time.monotonic() < end:
                time.sleep(0.001)
    finally:
        _let_threads_end()
        gc.unfreeze()
        for (owner, name), value in before.items():
            setattr(owner, name, value)
    if machine.errors:
        raise AssertionError(f"{machine.errors[0]} ({len(machine.errors)} such errors)")


def _set_device(device):
    _machine.local.device = _index(device)
