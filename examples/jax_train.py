"""Train with JAX: batches come as jax arrays, without a copy on the CPU."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import torch

import memfeed

ROWS, BATCH_SIZE = 200, 16


@jax.jit
def step(weights, images):
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(images @ w).mean())(weights)
    return weights - 0.01 * gradient, loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), Path(folder) / "data.mf", progress=False)
        loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True, seed=0, as_="jax")
        weights = jnp.ones((8, 1))
        for _ in range(2):
            seen = []
            for images, rows in loader:
                assert isinstance(images, jax.Array)
                weights, _ = step(weights, images)
                seen.append(rows)  # a batch is the caller's: keeping it is safe
            assert sorted(jnp.concatenate(seen).tolist()) == list(range(ROWS)), "an epoch lost or doubled rows"
