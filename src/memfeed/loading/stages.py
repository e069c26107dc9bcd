"""The stages of a batch between the gather and the caller: a list, built once per plan.

assemble, place on the device, transform of ours, record an event, wait for the transfer, the user's transform, add mask
and rows, convert to NumPy or JAX. A user's collate_fn takes the place of "assemble", or comes after the transform where
that is the store's own. A stage is in the list only where the plan needs it. Each says whether it must run in the
caller's thread; the first one that must, and all after it, run there. The stages before it run wherever batches are
made: in a thread, and on a GPU within the side stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from memfeed.errors import LoaderError
from memfeed.loading.batch_forms import CollateSamples
from memfeed.loading.bind import Bound
from memfeed.random import Keys
from memfeed.schema.containers import tensors_in
from memfeed.schema.fields import Node
from memfeed.schema.samples import Canvases
from memfeed.schema.tensordicts import is_a
from memfeed.transfer.streams import Event
from memfeed.transfer.to_device import to_device
from memfeed.transfer.transfer import ReceiveBatch, Transfer


class Arrival:
    """The transfer of one batch, or of several that crossed in one copy: waited for once per caller's stream.

    Holds no column, because columns may have to make room for others.
    """

    __slots__ = ("_event", "_ready_for", "_tensors")
    _NOT_YET = object()

    def __init__(self, tensors: Any, event: Event | None) -> None:
        self._tensors, self._event = tensors, event
        self._ready_for: object = self._NOT_YET

    def wait(self, receive: ReceiveBatch, current_stream: Callable[[], object]) -> None:
        """Make the caller's current stream wait for the transfer."""
        stream = current_stream()
        if stream != self._ready_for:
            receive(self._tensors, self._event)
            self._ready_for = stream


@dataclass(eq=False, slots=True)
class Draft:
    """A batch on its way through the stages.

    Args:
        value: the leaves, then the batch.
        keys: what a transform of ours draws by; None without one.
        valid: which rows count, bool [k]; None where all do.
        rows: the row numbers, int64 [k]; None where the batch does not give them.
        arrival: the transfer that brings it; None where there is none.
        note_taken: called when the caller takes it; see `memfeed.transfer.transfer`. None where there is no transfer.
        labels: returns a context in which transforms have the labels that the CPU has; None where none asks for them.
        canvases: the leaves that its samples have and the batch has not, where it is taken apart.
    """

    value: Any
    keys: Keys | None = None
    valid: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    arrival: Arrival | None = None
    note_taken: Callable[[], None] | None = None
    labels: Callable[[Any], AbstractContextManager[None]] | None = None
    canvases: Canvases = field(default_factory=dict)


class Stage(NamedTuple):
    """One step of a batch: ``run`` changes the draft in place."""

    name: str
    in_caller: bool
    run: Callable[[Draft], None]


@dataclass(frozen=True)
class Stages:
    """The stages of a plan, split into those that run ahead of the caller and those in its thread.

    Args:
        ahead: the former.
        in_caller: the latter, which hold no column.
        needs_keys: a transform draws by keys.
        needs_rows: batches give their row numbers.
        is_plain: batches are the gathered leaves put together, without a transform, a mask or rows.
    """

    ahead: tuple[Stage, ...]
    in_caller: tuple[Stage, ...]
    needs_keys: bool
    needs_rows: bool
    is_plain: bool

    def run_ahead(self, draft: Draft) -> None:
        """Run the stages that come before the caller's."""
        for stage in self.ahead:
            stage.run(draft)

    def finish(self, drafts: Iterable[Draft]) -> Iterable[Any]:
        """Return the finished batches of ``drafts``. To iterate it runs the remaining stages in the calling thread."""
        stages = self.in_caller

        def finished(draft: Draft) -> Any:
            for stage in stages:
                try:
                    stage.run(draft)
                except StopIteration as error:  # whoever iterates would take it for the end
                    raise LoaderError(
                        f"found StopIteration from {stage.name}; expected a batch: next(iterator, None) raises none"
                    ) from error
            return draft.value

        return map(finished, drafts)


@dataclass(frozen=True)
class UserStages:
    """The transform of a loader, and what else its batches get.

    Args:
        transform: of ours, a pure function of its keys, or a callable of the user's.
        is_keyed: it is of ours.
        runs_anywhere: whether it may run in a thread of ours.
        pads: batches get a mask of the rows that count.
        returns_rows: batches get their row numbers.
        collate: leaves, or a finished batch, to what the user's collate_fn makes of its samples, in the caller's
            thread; None without one.
        finishes_samples: the transform is the store's own: it runs before ``collate``, on the CPU.
        canvases: returns those of the leaves that ``collate`` needs beside a finished batch.
        convert: a batch of tensors to arrays of another library; None leaves tensors.
    """

    transform: Bound | None = None
    is_keyed: bool = True
    runs_anywhere: bool = True
    pads: bool = False
    returns_rows: bool = False
    collate: CollateSamples | None = None
    finishes_samples: bool = False
    canvases: Callable[[Sequence[Any]], Canvases] | None = None
    convert: Callable[[Any], Any] | None = None


def build_stages(assemble: Callable[[Any], Any], user: UserStages, transfer: Transfer, structure: Node) -> Stages:
    """Return the stages of batches of ``structure``, which ``assemble`` puts together from their leaves."""
    streams, has_extras, is_finishing = transfer.is_staged, user.pads or user.returns_rows, False
    is_ahead = user.runs_anywhere and (transfer.can_transform_ahead or user.finishes_samples)
    has_tensordicts = holds(structure, "tensordict", "tensorclass")
    transform, place = list[Stage](), list[Stage]()
    if user.transform is not None:
        name = "transform" if user.is_keyed else "the user's transform"
        transform.append(Stage(name, not is_ahead, partial(_transform, user.transform)))
    if transfer.device is not None:
        # mask and rows, and the device of TensorDicts, whose tensors are there already
        place.append(Stage("place on the device", False, partial(_move, partial(to_device, device=transfer.device))))
    place_ahead = streams and (has_extras or (bool(transform) and is_ahead and has_tensordicts))
    stages = [Stage("assemble", False, partial(_assemble, assemble, None))]
    if user.collate is not None:
        stages = [Stage("the user's collate_fn", True, partial(_collate, user.collate))]
        is_finishing = user.finishes_samples and bool(transform)
    if is_finishing:
        stages = [Stage("assemble", False, partial(_assemble, assemble, user.canvases)), *transform, *stages]
    if place_ahead:
        stages += place
    if is_ahead and not is_finishing:
        stages += transform
    if streams:
        # the event of the copy will do if nothing else computed on the device
        if len(stages) > 1 or holds(structure, "graph", "tensor"):
            stages.append(Stage("record an event", False, partial(_record, transfer.record_event)))
        wait = partial(_wait, transfer.receive_batch, transfer.current_stream)
        stages.append(Stage("wait for the transfer", True, wait))
    elif transfer.device is not None:
        stages.append(Stage("move", True, partial(_move, partial(transfer.receive_batch, event=None))))
    if streams and not place_ahead and has_tensordicts:
        stages += place
    if not is_ahead and not is_finishing:
        stages += transform
    if has_extras:
        stages.append(Stage("add mask and rows", False, _add_extras))
    if user.convert is not None:
        stages.append(Stage("convert", True, partial(_assemble, user.convert, None)))
    split = next((at for at, stage in enumerate(stages) if stage.in_caller), len(stages))
    return Stages(
        ahead=tuple(stages[:split]),
        in_caller=tuple(stages[split:]),
        needs_keys=bool(transform) and user.is_keyed,
        needs_rows=user.returns_rows,
        is_plain=not transform and not has_extras,
    )


def _assemble(make: Callable[[Any], Any], canvases: Callable[[Sequence[Any]], Canvases] | None, draft: Draft) -> None:
    if canvases is not None:
        draft.canvases = canvases(draft.value)
    draft.value = make(draft.value)


def _collate(collate: CollateSamples, draft: Draft) -> None:
    draft.value = collate(draft.value, draft.canvases)


def _transform(transform: Bound, draft: Draft) -> None:
    with nullcontext() if draft.labels is None else draft.labels(draft.value):
        draft.value = transform(draft.value, draft.keys)


def _record(record_event: Callable[[], Event | None], draft: Draft) -> None:
    # a list of tensors is walked faster than the batch, in the thread of the caller
    draft.arrival = Arrival(list(tensors_in((draft.value, draft.valid, draft.rows))), record_event())


def _wait(receive_batch: ReceiveBatch, current_stream: Callable[[], object], draft: Draft) -> None:
    assert draft.arrival is not None
    draft.arrival.wait(receive_batch, current_stream)
    if draft.note_taken is not None:
        draft.note_taken()


def _move(move: Callable[[Any], Any], draft: Draft) -> None:
    draft.value, draft.valid, draft.rows = move((draft.value, draft.valid, draft.rows))


def _add_extras(draft: Draft) -> None:
    found = {"valid": draft.valid, "rows": draft.rows}
    draft.value = with_extras(draft.value, {name: value for name, value in found.items() if value is not None})


def with_extras(batch: Any, extras: dict[str, torch.Tensor]) -> Any:
    """Return a dict or TensorDict with these keys, any other batch as (batch, *extras); each is [k].

    Raises LoaderError where the batch has one of the keys: a collate_fn or a transform may have put it there.
    """
    is_tensordict = is_a(batch, "tensordict", "TensorDictBase")
    if not is_tensordict and not isinstance(batch, dict):
        return (batch, *extras.values()) if extras else batch
    if taken := sorted({*batch.keys()} & extras.keys()):
        raise LoaderError(
            f'found a batch with the key "{taken[0]}", which last="pad" ("valid") or return_rows ("rows") adds; '
            "expected another name for it"
        )
    return batch.update(extras) if is_tensordict else {**batch, **extras}


def holds(structure: Node, *kinds: str) -> bool:
    """Return True if a container of one of these kinds is in it."""
    return structure.kind in kinds or any(holds(child, *kinds) for child in structure.children)
