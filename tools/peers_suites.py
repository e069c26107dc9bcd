"""Which tests of which projects are run with `memfeed.Loader` in the place of DataLoader, and where their source is."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """The loader tests of one project.

    Args:
        package: the name of the project's package, as it is installed.
        folder: where pytest runs, relative to the source.
        tests: files, relative to ``folder``; patterns are allowed, and "file::class".
        sources: folders to import from, relative to the source; () imports the installed package.
        imported: modules that are imported first and keep torch's DataLoader. Without any, the project's own loaders
            are classes derived from the replacement.
        patched: modules of helpers whose DataLoader is replaced as in the tests.
        address: the repository, for a project whose sdist has no tests; empty for one whose sdist has them.
        revision: of that repository; the newest one if empty.
    """

    package: str
    folder: str
    tests: tuple[str, ...]
    sources: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    patched: tuple[str, ...] = field(default=())
    address: str = ""
    revision: str = ""


_ACCELERATE = ("accelerate", "accelerate.data_loader", "accelerate.test_utils")
SUITES = {
    "torchdata": Suite(
        "torchdata",
        "test/stateful_dataloader",
        ("test_sampler.py", "test_state_dict.py", "test_dataloader.py"),  # the last one is the slowest
        (".",),
        ("torchdata.stateful_dataloader",),
        address="https://github.com/pytorch/data",
    ),
    "accelerate": Suite(
        "accelerate",
        "tests",
        ("test_data_loader.py", "test_accelerator.py", "test_state_checkpointing.py"),
        ("src", "."),
        _ACCELERATE,
        ("accelerate.test_utils.training",),
    ),
    # here the loaders that Accelerate builds for itself are replaced too
    "accelerate, inside": Suite(
        "accelerate", "tests", ("test_data_loader.py",), ("src", "."), _ACCELERATE, ("accelerate.data_loader",)
    ),
    "lightning": Suite(
        "lightning",
        "tests",
        (
            "tests_pytorch/trainer/test_dataloaders.py",
            "tests_pytorch/trainer/connectors/test_data_connector.py",
            "tests_pytorch/trainer/flags/test_overfit_batches.py",
            "tests_pytorch/trainer/dynamic_args/test_multiple_eval_dataloaders.py",
            "tests_pytorch/utilities/test_data.py",
            "tests_pytorch/utilities/test_combined_loader.py",
            "tests_pytorch/utilities/test_auto_restart.py",
            "tests_pytorch/overrides/test_distributed.py",
            "tests_pytorch/loops/test_fetchers.py",
            "tests_pytorch/loops/test_loops.py",
            "tests_pytorch/loops/test_prediction_loop.py",
            "tests_pytorch/loops/test_evaluation_loop.py",
            "tests_pytorch/callbacks/test_prediction_writer.py",
            "tests_pytorch/tuner/test_scale_batch_size.py",
            "tests_fabric/utilities/test_data.py",
            "tests_fabric/utilities/test_distributed.py",
            "tests_fabric/test_wrappers.py",
        ),
        ("src", "tests"),
        ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.tuner.tuning"),
        ("lightning.pytorch.demos.boring_classes",),
        address="https://github.com/Lightning-AI/pytorch-lightning",
    ),
    "skorch": Suite("skorch", "skorch/tests", ("test_*.py", "callbacks/test_*.py"), (".",)),
    "opacus": Suite(
        "opacus",
        "opacus/tests",
        (
            "batch_memory_manager_test.py",
            "dpdataloader_test.py",
            "gradient_accumulation_test.py",
            "poisson_test.py",
            # the other classes of this file train for minutes
            "privacy_engine_test.py::PrivacyEngineCustomLayerTest",
            "privacy_engine_test.py::PrivacyEngineTiedWeightsTest",
            "privacy_engine_validation_test.py",
            "randomness_test.py",
            "schedulers/*_test.py",
        ),
        (".",),
        ("opacus",),
    ),
    # here its DPDataLoader is a Loader
    "opacus, inside": Suite(
        "opacus",
        "opacus/tests",
        ("batch_memory_manager_test.py", "dpdataloader_test.py", "poisson_test.py", "randomness_test.py"),
        (".",),
    ),
    "torchtnt": Suite(
        "torchtnt",
        "tests",
        ("framework/test_*.py", "framework/callbacks/test_*.py", "utils/data/test_*.py"),
        (".",),
        ("torchtnt.framework", "torchtnt.utils.data"),
        ("torchtnt.framework._test_utils",),
        address="https://github.com/pytorch/tnt",
        revision="3e6fa3d0",  # of release 0.2.4; later ones import modules that are not public
    ),
    # its loaders are derived from DataLoader
    "torch_geometric": Suite(
        "torch_geometric",
        "test",
        ("loader/test_*.py", "data/test_hypergraph_data.py", "data/test_batch.py", "test_edge_index.py"),
        (".",),
        address="https://github.com/pyg-team/pytorch_geometric",
    ),
    "monai": Suite(
        "monai",
        ".",
        (
            "tests/data/test_*.py",
            "tests/data/meta_tensor/test_meta_tensor.py",
            "tests/transforms/compose/test_compose.py",
            "tests/transforms/inverse/test_inverse_collation.py",
            "tests/integration/test_pad_collation.py",
            "tests/integration/test_integration_workflows.py",
        ),
        (".",),
        address="https://github.com/Project-MONAI/MONAI",
    ),
    "ignite": Suite(
        "pytorch-ignite",
        ".",
        (
            "tests/ignite/engine/test_*.py",
            "tests/ignite/distributed/test_auto.py",
            "tests/ignite/handlers/test_lr_finder.py",
            "tests/ignite/handlers/test_param_scheduler.py",
        ),
        (".",),
        ("ignite", "ignite.engine", "ignite.engine.deterministic", "ignite.distributed"),
    ),
    "speechbrain": Suite(
        "speechbrain",
        ".",
        tuple(
            f"tests/unittests/test_{name}.py"
            for name in ("batching", "core", "data_pipeline", "dataloader", "dataset", "epoch_loop", "samplers")
        ),
        (".",),
        address="https://github.com/speechbrain/speechbrain",
    ),
    # its tests fit their own source only, which needs the huggingface_hub and tokenizers that it names: PYTHONPATH
    "transformers": Suite(
        "transformers",
        ".",
        ("tests/trainer/test_*.py",),
        ("src", "."),
        address="https://github.com/huggingface/transformers",
    ),
}


def source_of(suite: Suite, checkouts: Path) -> Path | str:
    """Return the folder with the source of a suite in ``checkouts``, or a sentence that says why there is none.

    An sdist that has the tests is downloaded there, in the version that is installed.
    """
    try:
        installed = version(suite.package)
    except PackageNotFoundError:
        return f"{suite.package} is not installed"
    if suite.address:
        checkout = checkouts / suite.address.rsplit("/", 1)[1]
        revision = suite.revision and f"; git -C {checkout} checkout {suite.revision}"
        missing = f"its sdist has no tests: git clone {suite.address} {checkout}{revision}"
        return checkout if checkout.is_dir() else missing
    name = f"{suite.package.replace('-', '_')}-{installed}"
    if not (checkouts / name).is_dir():
        with tempfile.TemporaryDirectory() as temporary:
            options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", temporary]
            command = [sys.executable, "-m", "pip", "download", *options, f"{suite.package}=={installed}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            archives = list(Path(temporary).glob("*.tar.gz"))
            if done.returncode or not archives:
                return f"no sdist of {suite.package} {installed} could be had"
            with tarfile.open(archives[0]) as archive:
                archive.extractall(checkouts, filter="data")
    return checkouts / name
