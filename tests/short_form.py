"""The short form of a test with many values: some of them in `make test`, the others in `make test-long`."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def short_form(values: Iterable[Any], short: int = 1) -> list[Any]:
    """Return the values of a parameter of a test, with the mark ``long`` on all but the first ``short`` of them."""
    return [value if at < short else pytest.param(value, marks=pytest.mark.long) for at, value in enumerate(values)]


EACH = {
    "convert/test_same_bytes.py": {"test_a_conversion_that_was_killed_writes_the_same_bytes": 4},
    "convert/test_samples_equal.py": {"test_every_kind_at_once": 3},
    "examples/test_examples.py": {"test_an_example_ends_well": 2},
    "loading/test_collate_of_finished_samples.py": {
        "test_batches_are_those_of_a_dataloader": 3,
        "test_samples_have_the_form_of_the_dataset": 3,
    },
    "loading/test_decoded.py": {"test_every_batch_is_the_programs_own": 3},
    "loading/test_loader_on_simulated_cuda.py": {
        "test_the_same_batches": 3,
        "test_a_slow_model_and_few_staging_buffers_see_every_batch_whole": 3,
        "test_memory_is_not_used_again_before_its_copy_is_done": 3,
    },
    "loading/test_placement.py": {"test_the_same_batches": 3},
    "remote/test_growth.py": {"test_it_may_fail_at_any_write": 2},
    "splitting/test_filled_splits.py": {
        "test_epochs_and_store_are_those_of_a_conversion": 3,
        "test_one_line_stores_images_in_the_form_that_keep_names": 3,
    },
    "splitting/test_idioms.py": {"test_an_idiom_is_right_or_refused": 3},
    "splitting/test_recipes.py": {
        "test_parameters_have_the_distribution_of_the_original": 3,
        "test_what_is_stored_and_what_is_batched": 3,
    },
    "splitting/test_refusals.py": {"test_an_array_made_of_a_result_is_followed": 3},
    "splitting/test_resizes_and_crops.py": {"test_crops_that_pad_show_every_place_as_often": 3},
    "splitting/test_warps_and_colours.py": {
        "test_parameters_have_the_distribution_of_the_original": 5,
        "test_warps_have_counterparts": 4,
        "test_one_angle_gives_the_values_of_torchvision": 2,
    },
    "torture/test_failed_syncs.py": {"test_what_a_failed_sync_loses_is_written_again": 3},
    "torture/test_faults.py": {
        "test_any_write_may_fail": 2,
        "test_power_may_fail_at_any_moment": 2,
        "test_no_file_stays_open": 2,
    },
    "torture/test_small_disks.py": {"test_a_nearly_full_disk_is_enough": 2},
    "transforms/test_counts_on_simulated_cuda.py": {"test_nothing_waits": 2},
    "transforms/test_resample_batch.py": {"test_launches_do_not_depend_on_the_batch": 3},
}
"""By file and test: `make test` runs the first of so many cases, and so on. `make test-long` runs all others.

A function may be in several classes of its file: these cases are counted together.
"""


def mark_long_cases(items: list[pytest.Item], root: Path) -> None:
    """Give the mark ``long`` to the cases that ``EACH`` leaves to ``make test-long``."""
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        if item.get_closest_marker("long") is not None:
            continue
        name = item.name.partition("[")[0]
        file = item.path.relative_to(root).as_posix()
        each = EACH.get(file, {}).get(name, 1)
        if seen[file, name] % each:
            item.add_marker(pytest.mark.long)
        seen[file, name] += 1
