"""The Python of the pages in docs runs as it stands, with small datasets in the place of those that they speak of."""

import re
import subprocess
import sys
import textwrap

import pytest

from test_readme import ROOT

MADE = """
import shutil, numpy as np, torch, memfeed
from pathlib import Path
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1

mean = std = (0.5, 0.5, 0.5)
for i in range(12):
    Path(f"photos/train/{'ab'[i % 2]}").mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(i).integers(0, 255, (260 + 10 * i, 300, 3), np.uint8)
    Image.fromarray(pixels).save(f"photos/train/{'ab'[i % 2]}/{i}.jpg")


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index), index


dataset = Squares()
"""
BEFORE = {
    "bench": ["", ""],
    "coming_from": [
        "",
        "",
        "make_sample = lambda i: {'x': torch.full((3,), i), 'name': str(i)}",
        """
        class Pairs(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(dataset[i] for i in range(100))
        pairs = Pairs()
        """,
        """
        import nibabel
        volumes = [f"{i}.nii.gz" for i in range(4)]
        for i, path in enumerate(volumes):
            nibabel.save(nibabel.Nifti1Image(np.full((24, 24, 24), i, np.int16), np.eye(4)), path)
        """,
        "",
    ],
    "filling": [""],
    "forms": ["dataset = [(torch.full((3, 32, 32), i, dtype=torch.uint8), i) for i in range(100)]", ""],
    "memoize": ["", "", "", "", ""],
    "remote": ["memfeed.cache(dataset, 'imagenet.mf')", ""],
    "sequences": [
        "",
        "",
        """
        steps = {"frame": torch.zeros(120, 3, 96, 96, dtype=torch.uint8), "state": torch.zeros(120, 7)}
        steps |= {"action": torch.zeros(120, 7), "episode": torch.arange(120)}
        """,
        "offsets = {'action': range(16)}",
    ],
    "splitting": [
        "",
        """
        dataset.transform = v1.Compose([v1.RandomResizedCrop(64), v1.ToTensor()])
        shutil.rmtree("photos.mf")
        """,
    ],
}
AFTER = {
    "coming_from": [
        "assert len(loader) == 7 and loader.dataset.finish() is None and memfeed.open('squares.mf')[3][1] == 3",
        "assert images.shape == (4, 3, 224, 224) and images.dtype == torch.uint8",
        "assert len(batch['name']) == 4 and len(memfeed.open('fast.mf')) == 100",
        "assert len(labels) == 4 and len(memfeed.open('shards.mf')) == 100",
        "assert crops.shape == (2, 16, 16, 16) and load.report().misses == 4",
        "assert images.shape == (4, 64, 128, 3) and len(memfeed.open('decoded.mf')) == 12",
    ],
    "bench": ["assert verdict.headline() and Path('verdict.html').stat().st_size > 1000", ""],
    "filling": ["assert sum(len(labels) for _, labels in loader) == 100"],
    "forms": ["assert len(store) == 100 and store[3][0].shape == (3, 32, 32)", "assert len(list(loader)) == 2"],
    "memoize": [
        "assert load.report()[2:4] == (84, 12)",
        "",
        "assert crop.shape == (32, 32, 3)",
        "assert bounded.report().misses == 12",
        "assert len(store) == 12 and store[0]['result'].shape == (32, 32, 3)",
    ],
    "remote": ["", "assert labels.shape == (36,)"],
    "sequences": [
        "assert batch['input_ids'].shape[1] == 128",
        "",
        "assert batch['action'].shape[1:] == (16, 7) and batch['frame'].shape[1:] == (2, 3, 96, 96)",
        "assert len(train) == 80 and len(val) == 40",
    ],
    "splitting": ["assert images.shape == (12, 3, 224, 224)", "assert images.shape == (12, 3, 64, 64)"],
}


def program(page, folder):
    """Return the blocks of a page as one program. Addresses and folders of a cluster lie below ``folder``."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    parts = [
        part
        for before, block, after in zip(BEFORE[page], blocks, AFTER[page], strict=True)
        for part in (textwrap.dedent(before), block, after)
    ]
    body = "\n".join(parts).replace("s3://bucket", f"file://{folder}/bucket").replace("/nvme", f"{folder}/nvme")
    return f"{MADE}\nif __name__ == '__main__':\n{textwrap.indent(body, '    ')}"


@pytest.mark.long
@pytest.mark.parametrize("page", BEFORE)
def test_a_page_runs(page, tmp_path):
    if page == "remote":
        pytest.importorskip("obstore")
    script = tmp_path / "page.py"
    script.write_text(program(page, tmp_path))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
