"""Many faults of each kind while a store is read, pulled and pushed: no wrong byte, no hang, errors that end.

MEMFEED_REMOTE_FAULTS is how many of each kind; `make remote-faults` takes 1,000. MEMFEED_REMOTE_FAULTS_JSON is a file
for what came of them, beside what is there of other kinds.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import memfeed
from fault_proxy import KINDS, FaultProxy
from measure import machine
from memfeed.errors import MemfeedError
from memfeed.remote import connections
from memfeed.remote.connections import Retry
from memfeed.remote.layout import RemoteStore, expected_chunks, read_chunk, read_manifest, verify
from memfeed.store.checksums import Chunk

FAULTS = int(os.environ.get("MEMFEED_REMOTE_FAULTS", "24"))
_MOST_SECONDS = 500  # until a run counts as one that does not end
_THREADS = 8
_SECRETS = ("SECRET", "test-key-id", "127.0.0.1")


@pytest.fixture
def store(tmp_path: Path) -> memfeed.Store:
    dataset = [{"x": torch.randn(64), "y": torch.randn(16), "text": f"{k} " * (k % 7)} for k in range(60)]
    return memfeed.cache(dataset, tmp_path / "local.mf", workers=0, progress=False)


def record(what: str, kind: str, figures: dict[str, object]) -> None:
    """Note what came of the faults of a kind, where `make remote-faults` asks for it."""
    if name := os.environ.get("MEMFEED_REMOTE_FAULTS_JSON"):
        path = Path(name)
        kept = json.loads(path.read_text()) if path.exists() else {"benchmark": "remote-faults", "quick": False}
        kept |= {"machine": machine(), "wanted": FAULTS}
        kept.setdefault(what, {})[kind] = figures
        path.write_text(json.dumps(kept, indent=1) + "\n")


def require_named(error: MemfeedError, address: str) -> str:
    """Return the kind of an error that names its address and has no credentials in it."""
    text = str(error)
    assert address in text, text
    assert len(text) < 400, text
    assert not [secret for secret in _SECRETS if secret in text], text
    return type(error).__name__


def read_one(remote: RemoteStore, local: Path, chunk: Chunk, expected: int) -> str:
    """Return "right", or the kind of the error."""
    try:
        data = read_chunk(remote, chunk, expected)
    except MemfeedError as error:
        return require_named(error, str(remote.address))
    assert bytes(data) == (local / chunk.name).read_bytes()[chunk.first : chunk.first + chunk.size]
    return "right"


@pytest.mark.parametrize("kind", [*KINDS, "latency"])
def test_reading_through_faults(store, bucket, proxy: FaultProxy, monkeypatch, kind):
    stall = 0.3 if kind == "stall" else 30.0
    monkeypatch.setattr(connections, "DEFAULT", Retry(6, 0.001, 0.01, stall))
    address = f"{bucket}/ants.mf"
    memfeed.push(store, address)
    remote, came, began = read_manifest(address), Counter(), time.monotonic()
    chunks = expected_chunks(remote)
    rng = random.Random(7)
    if kind == "latency":
        proxy.latency_seconds = 0.02
    else:
        proxy.inject(kind, every=3)
    seen = len(proxy.requests)
    with ThreadPoolExecutor(_THREADS) as pool:
        while (proxy.injected[kind] if kind != "latency" else len(proxy.requests) - seen) < FAULTS:
            assert time.monotonic() - began < _MOST_SECONDS, (kind, came)
            asked = [pool.submit(read_one, remote, store.path, *rng.choice(chunks)) for _ in range(_THREADS)]
            came.update(future.result(_MOST_SECONDS) for future in asked)
    injected = proxy.injected[kind] if kind != "latency" else len(proxy.requests) - seen
    record("reading", kind, {"faults": injected, "seconds": time.monotonic() - began, "came": dict(came)})
    assert came["right"] > 0, came
    if kind == "expired":
        assert came["RemoteError"] == proxy.injected[kind]
    elif kind == "latency":
        assert set(came) == {"right"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stall"])
def test_pushing_and_pulling_through_faults(store, bucket, proxy: FaultProxy, tmp_path, kind):
    """Each call either ends in an error, and shows nothing, or has done its work."""
    began, round_number, came = time.monotonic(), 0, Counter()
    while proxy.injected[kind] < FAULTS // (8 if kind == "expired" else 2):
        round_number += 1
        address, target = f"{bucket}/ants-{round_number}.mf", tmp_path / f"pulled-{round_number}.mf"
        proxy.inject(kind, every=29 if kind == "expired" else 5)  # which are not retried
        for work in (partial(memfeed.push, store, address), partial(memfeed.pull, address, target)):
            for _ in range(200):
                assert time.monotonic() - began < _MOST_SECONDS, (kind, came)
                try:
                    work()
                except MemfeedError as error:
                    came[require_named(error, address)] += 1
                    assert not target.exists()
                else:
                    break
            else:
                raise AssertionError(f"no call got through {came}")
        proxy.clear()
        verify(address)
        assert memfeed.open(target).digest == store.digest
        for name in store._view.manifest.files:
            assert (target / name).read_bytes() == (store.path / name).read_bytes()
    figures = {"faults": proxy.injected[kind], "seconds": time.monotonic() - began, "came": dict(came)}
    record("pushing and pulling", kind, {**figures, "stores": round_number})
