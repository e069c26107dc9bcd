"""Fuzzes the decoder of manifests with atheris, which follows the branches of its code: `pip install atheris`, then

python tests/fuzz_manifest.py [CORPUS] -max_total_time=60

Starts from the golden manifests; the small ones that it keeps are in fixtures/manifests. Not part of the tests:
`hostile.py` needs nothing that is not there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["memfeed.store.format", "memfeed.store.manifest", "memfeed.schema.fields"]):
    from memfeed.store import format
from memfeed.errors import StoreError

WHERE = Path("memfeed.json")


def one(data: bytes) -> None:
    """A manifest either holds together, and then comes back the same, or is refused."""
    try:
        manifest = format.decode(data, WHERE)
    except StoreError:
        return
    assert format.decode(format.encode(manifest), WHERE) == manifest


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as seeds:
        for store in (Path(__file__).parent / "fixtures" / "stores").glob("*/memfeed.json"):
            (Path(seeds) / store.parent.name).write_bytes(store.read_bytes())
        atheris.Setup([sys.argv[0], *sys.argv[1:], seeds, "-max_len=20000"], one)
        atheris.Fuzz()
