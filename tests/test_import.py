import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import memfeed

HEAVY = {"tensordict", "torch._dynamo", "typer", "rich", "sympy", "pandas", "torchvision"}


def run(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCH = """
import os, signal, sys, torch, torch.utils.data
before = set(sys.modules)
for line in sys.stdin:
    code, sys.argv[1:] = eval(line)
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        exec(code)
        print("new:", *sorted(set(sys.modules) - before), flush=True)
        break
    print("status:", os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def after_torch():
    """Return what runs code in a process that has imported torch and nothing else, and returns what it printed.

    Each process is forked from one that imported torch: that takes seconds.
    """
    with subprocess.Popen(
        [sys.executable, "-c", TORCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(code: str, *arguments: object) -> str:
            process.stdin.write(repr((code, [*map(str, arguments)])) + "\n")
            process.stdin.flush()
            out = ""
            while not (line := process.stdout.readline()).startswith("status:"):
                assert line, "the process that forks has ended"
                out += line
            assert line == "status: 0\n", out
            return out

        yield run
        process.stdin.close()
        assert process.wait(120) == 0


@pytest.fixture(scope="module")
def new_modules(after_torch):
    """Return what runs code and returns the modules that it imports beyond torch's."""
    return lambda code, *arguments: set(after_torch(code, *arguments).splitlines()[-1].split()[1:])


def test_import_loads_no_extra_and_starts_no_thread(after_torch):
    out = after_torch(
        "import sys, threading; from memfeed import *; "
        "extras = 'torchvision PIL matplotlib datasets pandas polars pyarrow h5py scipy torch_geometric'.split(); "
        "extras += ['obstore', 'triton', 'memfeed.transforms.backends.kernel']; "
        "print([m for m in extras if m in sys.modules], "
        "threading.active_count())"
    )
    assert out.splitlines()[0] == "[] 1"


@pytest.fixture(scope="module")
def small_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "s.mf"
    memfeed.cache(TensorDataset(torch.arange(20)), path, progress=False)
    return path


def test_import_is_light(new_modules):
    """Each public name imports what it needs when it is first used."""
    assert new_modules("import memfeed") == {"memfeed"}


def test_a_training_imports_no_conversion_transform_or_table(small_store, new_modules):
    new = new_modules(
        "import memfeed; next(iter(memfeed.Loader(memfeed.open(sys.argv[1]), 4, shuffle=True)))", small_store
    )
    rooms = {name.split(".")[1] for name in new if name.startswith("memfeed.")}
    assert rooms == {"codecs", "errors", "loading", "order", "random", "schema", "store", "system", "transfer"}
    assert not new & HEAVY
    assert not any("tensordict_dir" in name or "foreign" in name or "html" in name for name in new)
    own = {name for name in new if name.startswith("memfeed")}
    assert len(own) <= 130
    assert len(new - own) <= 60  # 48 with the newest versions, 51 with the oldest


@pytest.mark.parametrize("collate_fn", ["list", "None"])
def test_rows_of_varying_length_import_no_compiler(tmp_path, new_modules, collate_fn):
    """Operations on nested tensors would import torch.distributed and sympy."""
    alone = "from torch.nested._internal.nested_tensor import NestedTensor; NestedTensor(*[torch.arange(2)] * 2)"
    if new_modules(alone) & HEAVY:
        pytest.skip("this torch imports its compiler for any nested tensor")
    memfeed.cache([{"ids": torch.arange(i + 1)} for i in range(9)], tmp_path / "s.mf", progress=False, workers=0)
    new = new_modules(
        f"import memfeed; list(memfeed.Loader(memfeed.open(sys.argv[1]), 4, collate_fn={collate_fn}))",
        tmp_path / "s.mf",
    )
    assert not (new & HEAVY)
    assert "torch.distributed.tensor" not in new


def test_a_conversion_imports_no_loader(tmp_path, new_modules):
    code = "import memfeed; memfeed.cache([(torch.ones(2), 1)] * 9, sys.argv[1], progress=False, workers=0)"
    new = new_modules(code, tmp_path / "s.mf")
    assert not any(name.startswith(("memfeed.loading", "memfeed.transforms")) for name in new)
    assert not new & (HEAVY - {"tensordict", "torch._dynamo", "sympy"})  # tensordict writes the metadata of the commit


@pytest.mark.parametrize("words", [["--help"], ["inspect", "--help"], ["cache", "--help"], ["--version"]])
def test_help_does_not_import_torch(words):
    out = run(
        f"import sys; from memfeed.cli import main; status = main({words}); print(status, 'torch' in sys.modules)"
    )
    assert out.splitlines()[-1] == "0 False"


def test_inspect_imports_no_transform_and_no_conversion(small_store, new_modules):
    new = new_modules("from memfeed.cli import main; main(['inspect', sys.argv[1]])", small_store)
    assert not any(name.startswith(("memfeed.convert", "memfeed.transforms", "memfeed.loading")) for name in new)
    assert "tensordict" not in new


def test_public_names_are_those_of_their_modules():
    for name in memfeed.__all__:
        assert name in dir(memfeed)
        assert getattr(memfeed, name) is not None
    assert memfeed.Store is memfeed.store.store.Store
    assert memfeed.transforms.Compose.__module__ == "memfeed.transforms.compose"
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        memfeed.opne  # noqa: B018


def test_lazy_modules_are_imported_by_their_module_below_the_list():
    """Python 3.15 reads the list at each import statement, and knows a module by its full name."""
    found = 0
    for path in Path(memfeed.__file__).parent.rglob("*.py"):
        names: list[str] = []
        imported = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__lazy_modules__":
                names = ast.literal_eval(node.value)
            elif names and isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif names and isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        assert set(names) <= imported, path
        found += len(names)
    assert found


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


@pytest.mark.long
def test_tensordict_is_imported_only_where_it_is_met(tmp_path, after_torch):
    after_torch(STORE_AND_LOADER, tmp_path)
    assert after_torch(READ, tmp_path).startswith("False\n")


def test_arguments_are_few():
    def named(function):
        return set(inspect.signature(function).parameters)

    others = {"snapshot_every_n_steps", "follow_batch", "exclude_keys"}  # of StatefulDataLoader and PyG
    theirs = named(DataLoader.__init__) | others
    assert len(named(memfeed.Loader.__init__) - theirs) <= 15
    assert len(named(memfeed.cache) - {"dataset", "path"}) <= 14


def test_public_names_are_few_and_documented():
    public = set(memfeed.__all__) - {"__version__"}
    assert len(public) <= 21
    for name in public:
        assert getattr(memfeed, name).__doc__, name
