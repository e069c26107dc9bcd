"""What one does in IPython or a notebook: show the loader, stop a cell in the middle of an epoch, go on in the next."""

import os
import tempfile
from pathlib import Path

import torch
from IPython.core.interactiveshell import InteractiveShell

import memfeed

ROWS, BATCH_SIZE = 100, 8

CELLS = """
loader = memfeed.Loader(store, BATCH_SIZE, True)
# ---
assert "100 rows" in repr(loader)
# ---
images, rows = next(iter(loader))  # a look at one batch
# ---
seen, loader = [], memfeed.Loader(store, BATCH_SIZE, True, seed=5)
batches = iter(loader)
for step, (images, rows) in enumerate(batches):
    seen += rows.tolist()
    if step == 4:
        state = loader.state_dict()
        raise KeyboardInterrupt
# ---
seen += [row for images, rows in batches for row in rows.tolist()]
# ---
again = memfeed.Loader(store, BATCH_SIZE, True)
again.load_state_dict(state)
assert torch.cat([rows for images, rows in again]).tolist() == seen[5 * BATCH_SIZE :]
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        names = {"memfeed": memfeed, "store": store, "torch": torch, "BATCH_SIZE": BATCH_SIZE}
        shell = InteractiveShell.instance(user_ns=names)
        shell.history_manager.enabled = False
        for cell in CELLS.split("# ---"):
            result = shell.run_cell(cell, store_history=False)
            assert isinstance(result.error_in_exec, type(None) | KeyboardInterrupt), result.error_in_exec
        assert sorted(shell.user_ns["seen"]) == list(range(ROWS)), "the epoch that was interrupted lost or doubled rows"
