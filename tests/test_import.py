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


def test_public_names_are_few_and_documented():
    import memfeed

    public = set(memfeed.__all__) - {"__version__"}
    assert len(public) <= 12
    for name in public:
        assert getattr(memfeed, name).__doc__, name
