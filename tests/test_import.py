import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_extra_and_starts_no_thread():
    out = run(
        "import sys, threading, memfeed; "
        "extras = 'torchvision PIL matplotlib datasets pandas polars pyarrow h5py scipy torch_geometric'.split(); "
        "print([m for m in extras if m in sys.modules], "
        "threading.active_count())"
    )
    assert out.split() == ["[]", "1"]


def test_import_is_light():
    out = run(
        "import sys, torch, torch.utils.data; before = set(sys.modules); import memfeed; "
        "heavy = 'tensordict torch._dynamo typer rich sympy'.split(); "
        "print(sorted({m for m in heavy if m in set(sys.modules) - before}), len(set(sys.modules) - before))"
    )
    heavy, count = out.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(count) < 260, "modules that are new after import torch"


STORE_AND_LOADER = """
import sys, torch, memfeed
from torch.utils.data import get_worker_info

class Numbers:
    def __len__(self):
        return 200

    def __getitem__(self, i):
        if get_worker_info() is not None:
            assert "tensordict" not in sys.modules
        return {"x": torch.full((3,), i), "tokens": torch.arange(i % 4), "name": str(i), "at": (i, [i])}

store = memfeed.cache(Numbers(), sys.argv[1] + "/s.mf", workers=2, progress=False)
"""
READ = """
import sys, memfeed
import memfeed.transforms as T
store = memfeed.open(sys.argv[1] + "/s.mf")
batch = next(iter(memfeed.Loader(store, 8, shuffle=True, transform=lambda batch: batch)))
store[3], store[[1, 2]], store.__getitems__([4, 5]), memfeed.to_device(batch, "cpu")
print("tensordict" in sys.modules)
"""


def test_tensordict_is_imported_only_where_it_is_met(tmp_path):
    for code in (STORE_AND_LOADER, READ):
        ran = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "False\n"


def test_public_names_are_few_and_documented():
    import memfeed

    public = set(memfeed.__all__) - {"__version__"}
    assert len(public) <= 12
    for name in public:
        assert getattr(memfeed, name).__doc__, name
