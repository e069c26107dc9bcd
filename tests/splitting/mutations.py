"""Small changes of correct datasets, drawn at random and composed as source text: each gives a dataset of its own.

The samples of a changed dataset are right by definition: a loader must give the same ones, or refuse the dataset.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import idiom

HEADER = """
import functools, random, os, time
import albumentations as A
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from idiom import labels, mask_of, pictures
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
"""

TEMPLATE = """
class Mutant(Dataset):
    def __init__(self):
        self.images, self.labels = pictures(), labels()
        self.transform = {transform}
{init}
    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        label = self.labels[index]
        image = {image}
{before}
{call}
{after}
{last}
        return {result}


make = {make}
"""


@dataclass(frozen=True)
class Base:
    """A correct dataset: how it loads an image, its pipeline, how it calls it, and the leaves that it returns."""

    name: str
    image: str
    transform: str
    call: str
    leaves: tuple[str, ...]
    is_torch: bool = True


PIL, ARRAY = "Image.fromarray(self.images[index])", "self.images[index].copy()"
TENSOR = "torch.from_numpy(self.images[index]).permute(2, 0, 1).contiguous()"
PAIR = ("x", "mask")
BASES = [
    Base(
        "v1 on PIL images", PIL,
        "v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()])",
        "x = self.transform(image)", ("x", "label"),
    ),
    Base(
        "v1 with fixed steps", PIL,
        "v1.Compose([v1.Resize(36), v1.CenterCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])",
        "x = self.transform(image)", ("x", "label"),
    ),
    Base(
        "v2 on tensors", TENSOR,
        "v2.Compose([v2.RandomCrop(28), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])",
        "x = self.transform(image)", ("x", "label"),
    ),
    Base(
        "v2 on image and mask", TENSOR,
        "v2.Compose([v2.RandomCrop(28), v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()])",
        "x, mask = self.transform(tv_tensors.Image(image), tv_tensors.Mask(image[:1] // 28))", (*PAIR, "label"),
    ),
    Base(
        "albumentations with ToTensorV2", ARRAY,
        "A.Compose([A.RandomCrop(28, 28), A.HorizontalFlip(p=0.5), ToTensorV2()])",
        "x, mask = (out := self.transform(image=image, mask=mask_of(image)))['image'], out['mask']", (*PAIR, "label"),
    ),
    Base(
        "albumentations with arrays", ARRAY,
        "A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])",
        "x = self.transform(image=image)['image'].copy()", ("x", "label"), is_torch=False,
    ),
    Base(
        "nn.Sequential", TENSOR,
        "torch.nn.Sequential(v1.RandomHorizontalFlip(), v1.RandomVerticalFlip(), v1.ConvertImageDtype(torch.float))",
        "x = self.transform(image)", ("x", "label"),
    ),
    Base(
        "a list of steps", PIL,
        "[v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()]",
        "x = functools.reduce(lambda made, step: step(made), self.transform, image)", ("x", "label"),
    ),
    Base(
        "a function with draws of NumPy", ARRAY,
        "lambda image: np.roll(image, np.random.randint(8), 1)",
        "x = self.transform(image)", ("x", "label"), is_torch=False,
    ),
    Base(
        "colours of PIL images", PIL,
        "v1.Compose([v1.ColorJitter(0.4, 0.4), v1.RandomHorizontalFlip(), v1.ToTensor()])",
        "x = self.transform(image)", ("x", "label"),
    ),
]  # fmt: skip


@dataclass
class Parts:
    """The lines of a dataset that is being changed, and the share of its rows or draws that a change touches."""

    base: Base
    transform: str
    image: str
    call: list[str]
    leaves: list[str]
    init: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    form: str = "tuple"
    make: str = "Mutant"
    partial: str = ""
    rate: float = 1.0


@dataclass(frozen=True)
class Mutant:
    """A changed dataset.

    Args:
        number: the seed that it was drawn from.
        changes: what was changed, for people.
        source: Python whose name ``make`` makes the dataset.
        rate: the share of rows or draws that a change touches; of several changes the largest share.
    """

    number: int
    changes: tuple[str, ...]
    source: str
    rate: float

    @property
    def make(self) -> Callable[[], Any]:
        """Return the function that makes the dataset."""
        names: dict[str, Any] = {"__name__": "mutant"}
        exec(compile(HEADER + self.source, f"mutant {self.number}", "exec"), names)
        made: Callable[[], Any] = names["make"]
        return made

    def __str__(self) -> str:
        return f"mutant {self.number}: {'; '.join(self.changes)}"


DRAWS = ["random.random()", "np.random.rand()", "float(torch.rand(()))"]
TURNED = ["{}.flip(-1)", "{} * 0", "({} + 1)", "{}.flip(-2)"]
TURNED_ARRAY = ["{}[:, ::-1].copy()", "{} * 0", "({} + 1)", "{}[::-1].copy()"]
Change = Callable[[Parts, random.Random], str]


def turned(parts: Parts, draw: random.Random) -> str:
    """Return an expression of x, changed."""
    return draw.choice(TURNED if parts.base.is_torch else TURNED_ARRAY).format("x")


def when(parts: Parts, draw: random.Random) -> str:
    """Return a condition, and note how rare it is."""
    kind = draw.randrange(4)
    if kind == 0:
        chance = draw.choice([0.5, 0.2, 0.1, 0.05, 0.01])
        parts.rate = min(parts.rate, chance)
        return f"{draw.choice(DRAWS)} < {chance}"
    if kind == 1:
        period = draw.choice([2, 5, 8, 16])
        parts.rate = min(parts.rate, 1 / period)
        return f"index % {period} == {draw.randrange(period)}"
    if kind == 2:
        parts.rate = min(parts.rate, 0.1)
        return f"label == {draw.randrange(10)}"
    parts.rate = min(parts.rate, 0.1)
    return f"index % 2 == {draw.randrange(2)} and {draw.choice(DRAWS)} < 0.2"


def another_leaf(parts: Parts, draw: random.Random) -> str:
    """Add a leaf that is computed from the image."""
    torch_only = ["x.clone()", "x.float().mean()", "x.float().mean().item()", "x.double().std()", "x[..., :4]"]
    torch_only += ["int(x.float().sum()) % 7", "x > x.float().mean()", "x.argmax()", "x.numpy().copy()", "x.flip(-1)"]
    arrays = ["x.copy()", "x.mean()", "float(x.mean())", "x[:4].copy()", "int(x.sum()) % 7", "x > 90", "x.argmax()"]
    made = draw.choice(torch_only if parts.base.is_torch else arrays)
    parts.after.append(f"extra = {made}")
    parts.leaves.append("extra")
    return f"another leaf, {made}"


def rare_branch(parts: Parts, draw: random.Random) -> str:
    condition, made = when(parts, draw), turned(parts, draw)
    parts.after.append(f"x = {made} if {condition} else x")
    return f"x = {made} if {condition}"


def rare_branch_before(parts: Parts, draw: random.Random) -> str:
    condition = when(parts, draw)
    mirrored = {PIL: "ImageOps.mirror(image)", ARRAY: "image[:, ::-1].copy()", TENSOR: "image.flip(-1)"}[parts.image]
    parts.before.append(f"image = {mirrored} if {condition} else image")
    return f"image = {mirrored} if {condition}"


def second_call(parts: Parts, draw: random.Random) -> str:
    parts.after.append(parts.base.call.replace("x, mask =", "second, _ =").replace("x =", "second ="))
    parts.leaves.append("second")
    return "a second call"


def second_call_sometimes(parts: Parts, draw: random.Random) -> str:
    condition = when(parts, draw)
    parts.after += [f"if {condition}:", f"    {parts.base.call}"]
    return f"a second call if {condition}"


def in_place_after(parts: Parts, draw: random.Random) -> str:
    line = draw.choice(["x[..., :3] = 0", "x *= 2", "x[0] = 1"])
    parts.after.append(line)
    return line


def in_place_before(parts: Parts, draw: random.Random) -> str:
    line = draw.choice(["self.images[index, 0] = 255", "self.images[index, :, 0] ^= 1", "self.labels[index] = 3"])
    parts.before.append(line)
    return line


def draw_without_use(parts: Parts, draw: random.Random) -> str:
    side, line = draw.choice([parts.before, parts.after]), draw.choice(DRAWS)
    side.append(line)
    return f"{line}, without use"


def other_order(parts: Parts, draw: random.Random) -> str:
    if parts.base.name != "a list of steps":
        return another_leaf(parts, draw)
    parts.call = [
        "x = image",
        "for step in sorted(self.transform, key=lambda step: type(step).__name__):",
        "    x = step(x)",
    ]
    return "the steps in another order"


def other_type(parts: Parts, draw: random.Random) -> str:
    line = draw.choice(
        ["label = float(label)", "label = np.float32(label)", "label = torch.tensor([label])", "label = str(label)",
         "label = (label, -label)", "x = np.asarray(x)", "x = torch.as_tensor(x).double()", "label = label > 4"]
    )  # fmt: skip
    parts.last.append(line)
    return line


def other_form(parts: Parts, draw: random.Random) -> str:
    parts.form = draw.choice(["dict", "list", "nested"])
    return f"samples are {parts.form}"


def other_label(parts: Parts, draw: random.Random) -> str:
    value = "x.float().mean()" if parts.base.is_torch else "x[:, :4].mean()"
    first = "x.flatten()[0]"
    line = draw.choice(
        [f"label = label + int({first} > {value})", f"label = 9 if {value} > 60 else label", "label = 9 - label",
         f"label = label if {first} <= {value} else -1", f"label = int({value} * 100) % 10"]
    )  # fmt: skip
    parts.after.append(line)
    return line


def seeded(parts: Parts, draw: random.Random) -> str:
    line = draw.choice(["torch.manual_seed({})", "np.random.seed({})", "random.seed({})"])
    line = line.format(draw.choice(["index", "0", "label", "index % 8"]))
    draw.choice([parts.before, parts.before, parts.after]).append(line)
    return line


def hook(parts: Parts, draw: random.Random) -> str:
    if parts.base.name == "nn.Sequential":
        parts.init.append("self.transform.register_forward_hook(lambda module, given, made: made * 0.5)")
        return "a forward hook"
    if parts.base.name in ("a list of steps", "v2 on image and mask") or parts.base.name.startswith("alb"):
        return other_label(parts, draw)
    parts.init += ["inner = self.transform", "self.transform = lambda image: inner(image) * 0.5 + 1"]
    return "a function around the pipeline"


def wrapper(parts: Parts, draw: random.Random) -> str:
    parts.make = draw.choice(
        ["lambda: Subset(Mutant(), range(63, -1, -1))", "lambda: Outer(Mutant())",
         "lambda: ConcatDataset([Mutant(), Subset(Mutant(), range(16))])"]
    )  # fmt: skip
    return f"a dataset around it, {parts.make}"


def dropped_leaf(parts: Parts, draw: random.Random) -> str:
    parts.partial = when(parts, draw)
    return f"a leaf less if {parts.partial}"


def state(parts: Parts, draw: random.Random) -> str:
    period = draw.choice([2, 7, 16])
    parts.rate = min(parts.rate, 1 / period)
    parts.init.append("self.n = 0")
    parts.after += ["self.n += 1", f"x = {turned(parts, draw)} if self.n % {period} == 0 else x"]
    return f"a counter, each {period}th sample is changed"


def from_outside(parts: Parts, draw: random.Random) -> str:
    coin = draw.choice(["os.urandom(1)[0] < 64", "time.perf_counter_ns() // 100 % 4 == 0"])
    parts.after.append(f"x = {turned(parts, draw)} if {coin} else x")
    return f"a coin from outside, {coin}"


def other_row(parts: Parts, draw: random.Random) -> str:
    condition = when(parts, draw)
    parts.before.append(
        f"index = {draw.choice(['random.randrange(64)', '(index + 1) % 64'])} if {condition} else index"
    )
    parts.before.append(f"image, label = {parts.image}, self.labels[index]")
    return f"another row if {condition}"


CHANGES: list[Change] = [
    another_leaf, another_leaf, rare_branch, rare_branch, rare_branch_before, second_call, second_call_sometimes,
    in_place_after, in_place_before, draw_without_use, other_order, other_type, other_form, other_label, other_label,
    seeded, seeded, hook, wrapper, dropped_leaf, state, from_outside, other_row,
]  # fmt: skip

OUTER = """
class Outer(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        sample = self.dataset[index]
        return {"sample": sample, "index": index}
"""


def mutant(number: int) -> Mutant:
    """Return the dataset of a number: a base with one, two or three changes."""
    draw = random.Random(number)
    base = draw.choice(BASES)
    parts = Parts(base, base.transform, base.image, [base.call], list(base.leaves))
    changes, rates = [], []
    for change in draw.sample(CHANGES, draw.choice([1, 1, 2, 2, 3])):
        parts.rate = 1.0
        changes.append(change(parts, draw))
        rates.append(parts.rate)
    return Mutant(number, (base.name, *changes), source_of(parts), max(rates))


def source_of(parts: Parts) -> str:
    """Return the Python of a dataset."""
    results = [_result(leaves, parts.form) for leaves in (parts.leaves, parts.leaves[:-1])]
    result = f"{results[1]} if {parts.partial} else {results[0]}" if parts.partial else results[0]
    blocks = {
        name: "\n".join(f"        {line}" for line in getattr(parts, name))
        for name in ("init", "before", "call", "after", "last")
    }
    source = TEMPLATE.format(transform=parts.transform, image=parts.image, result=result, make=parts.make, **blocks)
    return OUTER + source


def _result(leaves: list[str], form: str) -> str:
    if form == "dict":
        return "{" + ", ".join(f"{leaf!r}: {leaf}" for leaf in leaves) + "}"
    if form == "nested":
        return f"{{'inputs': {{'x': x}}, 'others': ({', '.join(leaves[1:])},)}}"
    return ("[{}]" if form == "list" else "({},)").format(", ".join(leaves))


assert idiom.ROWS == 64  # the changes name rows
