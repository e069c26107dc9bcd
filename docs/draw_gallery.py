"""Draw docs/gallery.md and its pictures: each transform of memfeed.transforms, before and after.

python docs/draw_gallery.py
"""

from __future__ import annotations

import inspect
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
import torch
from PIL import Image, ImageDraw, ImageFont

import memfeed
import memfeed.transforms as T

PAGE = Path(__file__).with_name("gallery.md")
FOLDER = Path(__file__).with_name("gallery")
BEGIN, END = "<!-- gallery: drawn by docs/draw_gallery.py -->", "<!-- end of gallery -->"
HEIGHT, WIDTH = 112, 168
LABELS = ("coffee", "cat", "astronaut")
CUP, SAUCER = (173, 18, 410, 208), (78, 18, 480, 385)  # the mask's ellipse and the box, in the whole photograph
TINT, LINE, INK, PAPER = (0, 170, 255), (255, 225, 0), (70, 70, 70), (255, 255, 255)
GAP, CAPTION = 8, 18


@dataclass
class Shown:
    """A transform of the gallery.

    Args:
        line: the code.
        input: "scene" is one photograph with a mask and a box, in three rows; "photos" three photographs of one size;
            "sizes" three of several sizes; "floats" as "photos", in [0, 1]; "labels" the same with labels; "files"
            bytes of JPEG.
        seed: of the parameters that are drawn.
    """

    line: str
    input: str = "scene"
    seed: int = 0

    @property
    def name(self) -> str:
        """The transform's name."""
        return self.line.removeprefix("T.").partition("(")[0]


GALLERY = {
    "Crops and sizes": [
        Shown("T.RandomResizedCrop(112, scale=(0.3, 1))", seed=4),
        Shown("T.RandomCrop(80)"),
        Shown("T.CenterCrop(112)", "sizes"),
        Shown("T.Resize((112, 112))", "sizes"),
    ],
    "Flips and rotations": [
        Shown("T.RandomHorizontalFlip(0.5)", seed=1),
        Shown("T.RandomVerticalFlip(0.5)", seed=3),
        Shown("T.RandomFlip(axes=(0, 1))", seed=2),
        Shown('T.RandomRotation(30, "bilinear")'),
        Shown('T.RandomAffine(20, translate=(0.1, 0.1), scale=(0.6, 1.2), shear=15, interpolation="bilinear")', seed=1),
    ],
    "Colours and values": [
        Shown("T.ColorJitter(0.4, 0.4, 0.4, 0.1)", seed=3),
        Shown("T.RandomGrayscale(0.5)", seed=2),
        Shown("T.RandomErasing(0.7)", seed=3),
        Shown("T.ToDtype(torch.float32, scale=True)", "photos"),
        Shown("T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])", "photos"),
        Shown("T.Pointwise(lambda x: x**2.2)", "floats"),
    ],
    "Several images": [
        Shown("T.MixUp(num_classes=3)", "labels", seed=2),
        Shown("T.CutMix(num_classes=3)", "labels", seed=2),
    ],
    "Other functions": [
        Shown("T.Compose([T.RandomResizedCrop(112), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)])", seed=5),
        Shown("T.PerSample(lambda image: image.roll(torch.randint(0, 168, ()).item(), 2))"),
        Shown("T.Decode()", "files"),
    ],
}


def photograph(name: str, size: tuple[int, int] | None = None) -> Image.Image:
    """Return one of scikit-image's photographs, whole or resized to (width, height)."""
    whole = Image.fromarray(
        {"coffee": skimage.data.coffee, "cat": skimage.data.chelsea}.get(name, skimage.data.astronaut)()
    )
    return whole if size is None else whole.resize(size, Image.Resampling.LANCZOS)


def as_tensor(image: Image.Image) -> torch.Tensor:
    """Return uint8 [3, h, w]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def make_batch(kind: str) -> tuple[dict[str, Any], list[str]]:
    """Return the batch before the transform, and the fields that it changes."""
    if kind == "scene":
        whole = photograph("coffee")
        mask = Image.new("L", whole.size)
        ImageDraw.Draw(mask).ellipse(CUP, fill=1)
        small = np.array(mask.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST))
        box = torch.tensor(SAUCER) * torch.tensor([WIDTH / whole.width, HEIGHT / whole.height]).repeat(2)
        scene = {
            "image": as_tensor(photograph("coffee", (WIDTH, HEIGHT))),
            "mask": torch.from_numpy(small),
            "boxes": box[None],
        }
        return {name: torch.stack([value] * 3) for name, value in scene.items()}, list(scene)
    if kind == "files":
        files = []
        for name in LABELS:
            file = io.BytesIO()
            photograph(name).save(file, "JPEG", quality=90)
            files.append(file.getvalue())
        return {"image": files}, ["image"]
    if kind == "sizes":
        sizes = [(168, 112), (180, 120), (128, 128)]
        return {"image": [as_tensor(photograph(*each)) for each in zip(LABELS, sizes, strict=True)]}, ["image"]
    images = torch.stack([as_tensor(photograph(name, (WIDTH, HEIGHT))) for name in LABELS])
    if kind == "photos":
        return {"image": images}, ["image"]
    if kind == "floats":
        return {"image": images / 255}, ["image"]
    return {"image": images / 255, "label": torch.arange(3)}, ["image", "label"]


def tile(batch: dict[str, Any], row: int, caption: str = "") -> Image.Image:
    """Return a row of a batch as a picture: the image, tinted where its mask is, its box, and words about it.

    These are the ``caption``, without one its shape, and for "values" its dtype and its least and largest value. Values
    below 0 are shown as a fifth of them, around the middle.
    """
    image = batch["image"][row]
    if isinstance(image, bytes):
        words, picture = f"{len(image):,} bytes", Image.new("RGB", (WIDTH, HEIGHT), (230, 230, 230))
        ImageDraw.Draw(picture).text((10, 46), f"{image[:8].hex(' ')} ...", INK, font())
    else:
        low, high = image.min().item(), image.max().item()
        words = caption or f"[{', '.join(map(str, image.shape))}]"
        if caption == "values":
            shown = f"{low:.2f} to {high:.2f}" if image.is_floating_point() else f"{low} to {high}"
            words = f"{str(image.dtype).removeprefix('torch.')}, {shown}"
            image = image if low >= 0 else image / 5 + 0.5
        if image.is_floating_point():
            image = (image.clamp(0, 1) * 255).round().to(torch.uint8)
        pixels = image.permute(1, 2, 0).numpy().copy()
        if "mask" in batch:
            inside = batch["mask"][row].numpy().astype(bool)
            pixels[inside] = (0.55 * pixels[inside] + 0.45 * np.array(TINT)).astype(np.uint8)
        picture = Image.fromarray(pixels)
        if max(picture.size) > WIDTH:
            picture.thumbnail((WIDTH, HEIGHT))
        if "boxes" in batch:
            ImageDraw.Draw(picture).rectangle(batch["boxes"][row, 0].round().int().tolist(), outline=LINE, width=2)
    whole = Image.new("RGB", (max(picture.width, WIDTH), max(picture.height, HEIGHT) + CAPTION), PAPER)
    whole.paste(picture, (0, 0))
    ImageDraw.Draw(whole).text((0, picture.height + 2), words, INK, font())
    return whole


def font() -> Any:
    """Return the font of the words."""
    return ImageFont.load_default(12)


def shares(label: torch.Tensor) -> str:
    """Return the words of a label: 'coffee', or '0.62 coffee, 0.38 cat'."""
    if label.ndim == 0:
        return LABELS[int(label)]
    return ", ".join(f"{share:.2f} {name}" for share, name in zip(label.tolist(), LABELS, strict=True) if share)


def changed(shown: Shown) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the batch before the transform, and after it."""
    before, fields = make_batch(shown.input)
    transform = eval(shown.line, {"T": T, "torch": torch})
    if isinstance(transform, T.PerSample):
        before, fields = {"image": before["image"]}, ["image"]
    on = fields[0] if len(fields) == 1 else fields
    keys = memfeed.Keys(seed=shown.seed, epoch=0, rows=torch.arange(3))
    return before, T.Compose([transform], on=on).apply(dict(before), keys)


def draw(shown: Shown) -> Image.Image:
    """Return the picture of a transform: before, and three rows after."""
    before, after = changed(shown)
    captions = [["", "", ""], ["", "", ""]]
    if "label" in before:
        captions = [[shares(label) for label in batch["label"]] for batch in (before, after)]
    if shown.input in ("photos", "floats"):
        captions = [["values"] * 3] * 2
    is_one = shown.input == "scene"
    tops = [tile(before, row, captions[0][row]) for row in range(1 if is_one else 3)]
    rows = [tile(after, row, captions[1][row]) for row in range(3)]
    lines = [[*tops, *rows]] if is_one else [tops, rows]
    heights = [max(one.height for one in line) for line in lines]
    columns = len(lines[0])
    width = columns * WIDTH + (columns - 1) * GAP + (2 * GAP if is_one else 0)
    picture = Image.new("RGB", (width, sum(heights) + GAP * (len(lines) - 1)), PAPER)
    y = 0
    for line, height in zip(lines, heights, strict=True):
        x = 0
        for index, one in enumerate(line):
            picture.paste(one, (x, y))
            x += WIDTH + GAP
            if is_one and index == 0:  # a line between before and after
                ImageDraw.Draw(picture).line((x + GAP // 2 - 2, 0, x + GAP // 2 - 2, HEIGHT), fill=(190, 190, 190))
                x += 2 * GAP
        y += height + GAP
    return picture


def sentence(name: str) -> str:
    """Return the first sentence of a transform's docstring, as Markdown."""
    return inspect.getdoc(getattr(T, name)).split("\n")[0].replace("``", "`")  # type: ignore[union-attr]


def drawn_page(page: str) -> str:
    """Return the page with its sections drawn anew."""
    parts = []
    for title, entries in GALLERY.items():
        parts.append(f"## {title}")
        for shown in entries:
            picture = f"![{shown.name}: before and after]({FOLDER.name}/{shown.name}.jpg)"
            parts.append(f"### {shown.name}\n\n{sentence(shown.name)}\n\n```python\n{shown.line}\n```\n\n{picture}")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for entry in [shown for entries in GALLERY.values() for shown in entries]:
        draw(entry).save(FOLDER / f"{entry.name}.jpg", quality=75, optimize=True)
    PAGE.write_text(drawn_page(PAGE.read_text()))
    print(f"wrote {PAGE} and the pictures in {FOLDER}")
