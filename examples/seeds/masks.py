"""Images, masks and labels: one augmentation moves both, and a store is read many times as fast as the files.

The demo that wraps a Dataset into a memory-mapped TensorDict, with one line in its place.
"""

import io
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import memfeed
import memfeed.transforms as T

ROWS, SIDE, BATCH = 256, 128, 32


class Shapes(Dataset):
    """Discs on noise, as PNG files in memory, with their masks."""

    def __init__(self):
        self.files = []
        for i in range(ROWS):
            draw = np.random.default_rng(i)
            y, x = np.ogrid[:SIDE, :SIDE]
            mask = (y - draw.integers(20, 108)) ** 2 + (x - draw.integers(20, 108)) ** 2 < 400
            image = draw.integers(0, 100, (SIDE, SIDE, 3)) + 120 * mask[..., None]
            self.files.append([_png(image), _png(255 * mask)])

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        image, mask = (np.asarray(Image.open(io.BytesIO(data))) for data in self.files[i])
        return {
            "image": torch.from_numpy(image.transpose(2, 0, 1).copy()),
            "mask": torch.from_numpy(mask > 0),
            "label": i,
        }


def _png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def epoch(loader):
    started, labels = time.perf_counter(), []
    for batch in loader:
        # a disc is brighter than all noise: wherever it was moved, its mask went with it
        assert torch.equal(batch["image"].amin(1) >= 120, batch["mask"])
        labels += batch["label"].tolist()
    assert sorted(labels) == list(range(ROWS))
    return time.perf_counter() - started


if __name__ == "__main__":
    torch.set_num_threads(1)  # for the comparison of masks: torch's threads wait for each other on busy cores
    augment = T.Compose([T.RandomHorizontalFlip(on=["image", "mask"]), T.RandomCrop(112, on=["image", "mask"])])
    loader = memfeed.Loader(Shapes(), BATCH, shuffle=True, cache="shapes.mf", transform=augment)
    epoch(loader)  # reads the files, and fills the store
    ours = min(epoch(loader) for _ in range(10))  # short, so other programs can disturb several
    files = min(epoch(DataLoader(Shapes(), BATCH, shuffle=True)) for _ in range(2))
    print(f"an epoch of the store is {files / ours:.1f} times as fast as one of the files")
    assert files > 1.5 * ours  # the comparison of masks takes its time too
