"""Install memfeed and the libraries of its tests as far as they have wheels for this Python.

For a new version of Python, and for builds without the GIL, where some libraries have none for months. Those are named.
Most tests that need one of them are skipped; those of coded fields fail without lz4, zstandard and simplejpeg.

    python tools/install_wheels.py        # into the environment of this python
"""

import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
EXTRAS = ("vision", "plots", "dev", "trainers", "remote", "ray")  # as `make test`


def is_installed(*arguments: str) -> bool:
    """Return whether pip could install that."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Install one library after another. Return 1 if one of those that memfeed needs, or pytest, has no wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [name for extra in EXTRAS for name in project["optional-dependencies"][extra]]
    needed = [*project["dependencies"], *(name for name in wanted if name.startswith(("hypothesis", "pytest")))]
    if not is_installed(*needed):
        print(f"no wheels for all of these: {' '.join(needed)}")
        return 1
    missing = [name for name in dict.fromkeys(wanted) if not is_installed(name)]
    print(f"no wheels for {sys.version.split()[0]}: {' '.join(missing) or 'none missing'}")
    memfeed = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT)]
    return subprocess.run(memfeed, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
