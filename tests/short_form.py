"""The short form of a test with many values: some of them in `make test`, the others in `make test-long`."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest


def short_form(values: Iterable[Any], short: int = 1) -> list[Any]:
    """Return the values of a parameter of a test, with the mark ``long`` on all but the first ``short`` of them."""
    return [value if at < short else pytest.param(value, marks=pytest.mark.long) for at, value in enumerate(values)]


EACH = {
    "building/test_build.py": {"test_sync_points_come_while_rows_are_written": 2},
    "cli/test_bench_command.py": {"test_a_program_is_measured_and_written_to_files": 2},
    "codecs/test_hostile_blobs.py": {"test_changed_blobs_are_refused_or_a_row": 2},
    "convert/test_append.py": {"test_a_store_that_was_open_and_not_read_keeps_its_rows": 2},
    "convert/test_attributes.py": {"test_a_manifest_that_lies_is_refused": 3},
    "convert/test_cache.py": {"test_one_of_everything_comes_back": 2},
    "convert/test_changes.py": {
        "test_labels_in_objects_are_compared_and_what_they_keep_is_not": 3,
        "test_one_label_of_a_thousand_that_changed_in_place": 4,
        "test_what_a_program_changes": 2,
    },
    "convert/test_driver.py": {"test_the_first_row_that_differs_promotes_its_column": 2},
    "convert/test_file_digests.py": {"test_a_file_of_many_that_was_rewritten_is_seen": 2},
    "convert/test_filling.py": {"test_a_filled_store_is_the_one_that_cache_writes": 2},
    "convert/test_filling_shapes.py": {"test_every_row_comes_once_and_the_store_is_right": 2},
    "convert/test_forms.py": {
        "test_a_lossy_codec_for_all_leaves_masks_as_they_are": 2,
        "test_images_are_kept_as_jpeg_near_to_the_original": 2,
    },
    "convert/test_inputs.py": {"test_none_in_place_of_a_broken_sample": 2},
    "convert/test_iterable_lengths.py": {"test_an_iterable_without_an_end_needs_a_length": 3},
    "convert/test_jagged_dims.py": {"test_a_row_of_another_length_promotes_along_its_dim": 2},
    "convert/test_jobs.py": {"test_samples_that_raise_can_be_left_out": 2},
    "convert/test_mapped.py": {"test_mapped_data_is_copied_only_on_request": 3},
    "convert/test_randomness.py": {"test_samples_whose_values_agree_are_not_random": 2},
    "convert/test_repair.py": {
        "test_a_dataset_that_gives_other_rows_is_refused": 3,
        "test_rows_without_a_place_get_a_new_one": 2,
    },
    "convert/test_reused_buffers.py": {
        "test_every_row_is_what_the_dataset_gave": 2,
        "test_no_kind_of_object_is_stored_late": 3,
        "test_samples_read_together_share_no_object": 2,
    },
    "convert/test_same_bytes.py": {
        "test_a_conversion_that_was_killed_writes_the_same_bytes": 8,
        "test_samples_that_are_left_out_leave_no_gaps": 1,
    },
    "convert/test_samples_equal.py": {"test_every_kind_at_once": 6, "test_every_kind_at_once_with_workers": 2},
    "convert/test_watchdog.py": {"test_a_sample_that_kills_its_worker_is_skipped": 3},
    "convert/test_written_settings.py": {"test_what_a_step_keeps_at_a_call_is_no_setting": 2},
    "examples/test_examples.py": {"test_an_example_ends_well": 1},
    "loading/test_collate.py": {"test_each_epoch_has_other_crops": 3},
    "loading/test_collate_of_finished_samples.py": {
        "test_batches_are_those_of_a_dataloader": 5,
        "test_samples_have_the_form_of_the_dataset": 3,
    },
    "loading/test_decoded.py": {
        "test_every_batch_is_the_programs_own": 6,
        "test_is_a_data_loader": 3,
        "test_lightning_seeds_the_workers_of_each_rank": 2,
    },
    "loading/test_device_decode.py": {"test_batches_are_those_of_the_cpu": 3},
    "loading/test_global_modes.py": {"test_inference_mode_that_is_left_within_an_epoch": 3},
    "loading/test_host_labels.py": {"test_a_label_that_is_no_class_is_an_error_with_its_row": 3},
    "loading/test_image_sizes.py": {
        "test_images_of_which_one_side_varies": 2,
        "test_who_writes_to_a_batch_never_changes_the_store": 3,
    },
    "loading/test_loader_of_datasets.py": {"test_so_does_a_loader_that_a_trainer_makes_of_the_parts": 2},
    "loading/test_loader_on_simulated_cuda.py": {
        "test_a_sampler_is_called_in_the_callers_thread": 3,
        "test_a_slow_model_and_few_staging_buffers_see_every_batch_whole": 3,
        "test_memory_is_not_used_again_before_its_copy_is_done": 3,
        "test_several_threads_send_at_once": 4,
        "test_the_same_batches": 6,
        "test_transforms_on_the_device_give_what_they_give_on_the_cpu": 3,
    },
    "loading/test_packed_epochs.py": {"test_every_epoch_has_every_token_once_in_other_blocks": 2},
    "loading/test_placement.py": {"test_a_sampler_is_called_in_the_callers_thread": 3, "test_the_same_batches": 6},
    "loading/test_processes.py": {"test_a_forked_child_goes_on_with_the_same_iterator": 3},
    "loading/test_ranks.py": {"test_ranks_of_torch_distributed_read_what_one_would": 2},
    "loading/test_rebuilt_loaders.py": {"test_lightning": 2},
    "loading/test_sharded_ranks.py": {"test_what_differs_between_ranks_is_one_error_on_all": 3},
    "memoizing/test_memoize.py": {"test_workers_of_a_dataloader_share_results": 2},
    "remote/test_failed_remote_syncs.py": {
        "test_chunks_are_not_there_if_a_process_was_killed_after_their_sync_failed": 4
    },
    "remote/test_growth.py": {"test_it_may_fail_at_any_write": 2},
    "remote/test_opening.py": {
        "test_a_loader_gives_the_batches_of_the_local_store": 2,
        "test_faults_change_no_row": 2,
        "test_pieces_of_two_nodes_are_those_of_a_local_store": 2,
        "test_workers_of_a_dataloader": 3,
    },
    "remote/test_push_pull.py": {"test_after_a_kill_the_same_call_finishes": 1},
    "remote/test_remote_faults.py": {"test_pushing_and_pulling_through_faults": 3, "test_reading_through_faults": 4},
    "schema/test_graphs.py": {
        "test_a_sparse_matrix_of_a_graph": 3,
        "test_an_index_keeps_its_class_and_its_settings": 3,
    },
    "schema/test_kept_tensors.py": {"test_sparse_tensors_come_back": 3},
    "schema/test_torch_datasets.py": {"test_what_a_subclass_makes_of_a_sample_counts": 2},
    "splitting/test_filled_splits.py": {
        "test_epochs_and_store_are_those_of_a_conversion": 4,
        "test_one_line_gives_the_batches_of_a_conversion": 1,
        "test_without_randomness_each_row_is_what_the_dataset_gives": 3,
    },
    "splitting/test_idioms.py": {"test_an_idiom_is_right_or_refused": 28},
    "splitting/test_judge.py": {"test_wrong_loaders_are_called_wrong": 3},
    "splitting/test_recipes.py": {
        "test_a_split_pipeline_equals_the_original_with_its_randomness_off": 3,
        "test_parameters_have_the_distribution_of_the_original": 3,
        "test_what_is_stored_and_what_is_batched": 3,
    },
    "splitting/test_refusals.py": {"test_an_array_made_of_a_result_is_followed": 3},
    "splitting/test_resizes_and_crops.py": {"test_crops_that_pad_show_every_place_as_often": 5},
    "splitting/test_sample_types.py": {"test_samples_have_the_types_of_the_dataset": 2},
    "splitting/test_split.py": {
        "test_a_pipeline_inside_other_datasets_is_found": 2,
        "test_lists_sequentials_and_named_attributes": 2,
    },
    "splitting/test_unread.py": {"test_it_fills_a_store_in_processes_that_are_not_forked": 4},
    "splitting/test_warps_and_colours.py": {
        "test_one_angle_gives_the_values_of_torchvision": 4,
        "test_parameters_have_the_distribution_of_the_original": 5,
        "test_warps_have_counterparts": 10,
    },
    "store/test_coded_columns.py": {"test_a_read_gives_what_the_raw_store_gives": 3},
    "store/test_foreign.py": {"test_an_archive_has_the_rows_of_the_directory": 3},
    "store/test_gather.py": {"test_a_batch_comes_apart_into_its_samples": 2},
    "store/test_hostile.py": {"test_no_byte_of_a_column_changes_unseen": 3},
    "store/test_manifest.py": {"test_a_manifest_that_does_not_hold_together_is_refused": 2},
    "store/test_window_view.py": {"test_what_is_no_offsets": 3},
    "system/test_signals.py": {"test_a_writer_syncs_what_it_has": 2},
    "system/test_torch_loader.py": {"test_a_program_that_has_replaced_it": 2},
    "system/test_thread_choice.py": {"test_the_fewest_threads_that_are_worth_it": 3},
    "test_error_length.py": {"test_an_error_of_a_wide_store_is_short": 3},
    "test_readme.py": {"test_the_page_runs": 2},
    "test_shared_arguments.py": {"test_progress_shows_a_bar_as_it_says": 4},
    "torture/test_failed_syncs.py": {
        "test_rows_are_absent_if_a_process_was_killed_after_their_sync_failed": 2,
        "test_what_a_failed_sync_loses_is_written_again": 8,
    },
    "torture/test_faults.py": {
        "test_any_write_may_fail": 4,
        "test_no_file_stays_open": 4,
        "test_power_may_fail_at_any_moment": 8,
    },
    "torture/test_small_disks.py": {"test_a_nearly_full_disk_is_enough": 4},
    "torture/test_torture.py": {"test_short_torture": 6},
    "transforms/interpreted_kernel.py": {
        "test_masks_of_any_dtype_take_the_kernel": 3,
        "test_sequences": 2,
        "test_several_tiles": 2,
    },
    "transforms/interpreted_sampling.py": {
        "test_boxes_that_shrink_and_grow": 2,
        "test_launches": 2,
        "test_masks_take_the_kernel": 3,
    },
    "transforms/test_counts_on_simulated_cuda.py": {
        "test_nothing_waits": 4,
        "test_nothing_waits_for_masks_boxes_and_points": 4,
    },
    "transforms/test_gallery.py": {"test_a_picture_shows_what_the_transform_does": 4},
    "transforms/test_per_sample.py": {"test_the_steps_of_albumentations_draw_other_numbers": 2},
    "transforms/test_resample_batch.py": {"test_launches_do_not_depend_on_the_batch": 3},
}
"""By file and test: `make test` runs the first of so many cases, and so on. `make test-long` runs all others.

A function may be in several classes of its file: these cases are counted together.
"""

LONG = {
    "building/test_foreign_builds.py": ["test_what_cannot_be_read_is_an_error_of_ours"],
    "cli/test_bench_command.py": ["test_the_status_of_a_comparison_is_for_ci"],
    "cli/test_cli.py": ["test_a_reader_that_has_seen_enough_is_no_error"],
    "cli/test_demo.py": [
        "test_a_small_demo",
        "test_a_place_for_the_picture_is_looked_for_first",
        "test_the_command_on_real_photographs",
        "test_without_an_extra_it_says_how_to_get_it",
    ],
    "cli/test_dry_run.py": ["test_a_pipeline_with_a_choice_shows_it"],
    "convert/test_append.py": ["test_appends_of_several_processes_come_one_after_another"],
    "convert/test_budget.py": ["test_processes_that_begin_together_take_one_form"],
    "convert/test_cache.py": ["test_photographs"],
    "convert/test_changes.py": ["test_labels_that_the_first_sample_of_a_cut_dataset_loads_are_compared"],
    "convert/test_conversion_processes.py": ["test_no_worker_starts_unasked_where_it_would_import_the_program"],
    "convert/test_filling.py": ["test_a_program_that_ends_waits_for_the_commit"],
    "convert/test_filling_signals.py": ["test_no_row_is_lost_and_no_process_is_left"],
    "convert/test_joining.py": ["test_the_end_of_a_process_does_not_write_to_pipes_that_are_closed"],
    "convert/test_same_bytes.py": ["test_rows_that_a_dead_worker_had_asked_space_for_go_there"],
    "convert/test_written_settings.py": ["test_albumentations_keeps_the_parameters_of_its_last_call"],
    "loading/test_changing_policy.py": ["test_every_pass_has_its_rows"],
    "loading/test_dataloader_surface.py": ["test_arguments_of_worker_processes_are_accepted_and_named_once"],
    "loading/test_decoded.py": ["test_where_a_program_has_put_loader_in_the_place_of_data_loader"],
    "loading/test_differences.py": [
        "test_a_cell_is_equal_or_the_page_says_how_it_differs",
        "test_each_row_of_the_page_is_found",
    ],
    "loading/test_drawn_seed.py": [
        "test_a_loader_that_rank_0_does_not_read_is_an_error",
        "test_loaders_differ",
        "test_rank_0_may_read_alone",
        "test_ranks_read_one_order",
        "test_samplers_of_ranks_draw_one_order",
    ],
    "loading/test_global_modes.py": ["test_each_tensor_that_is_made_names_its_device"],
    "loading/test_host_labels.py": ["test_labels_that_a_function_made_on_the_device_are_checked_there"],
    "loading/test_loader_of_datasets.py": ["test_an_iterator_that_lives_when_the_program_ends_says_nothing"],
    "loading/test_own_rows.py": ["test_a_chunk_of_each_rank_is_not_divided_after_a_store_that_all_have"],
    "loading/test_processes.py": ["test_the_interpreter_exits_while_threads_work"],
    "memoizing/test_code.py": ["test_it_is_the_same_in_every_process"],
    "memoizing/test_memoize.py": ["test_a_line_is_printed_at_exit", "test_the_command_line_shows_and_verifies_results"],
    "memoizing/test_shared_results.py": [
        "test_four_processes_compute_each_key_once",
        "test_results_are_dropped_while_processes_are_killed",
    ],
    "order/test_bijection.py": ["test_every_entry_is_as_likely_at_every_position"],
    "order/test_pieces.py": ["test_rows_of_different_blocks_meet_in_a_rank_as_often_as_by_chance"],
    "remote/test_growth.py": ["test_it_may_fail_at_any_write"],
    "remote/test_opening.py": [
        "test_a_file_of_a_cache_that_was_cut_names_the_directory_to_remove",
        "test_what_a_killed_process_fetched_is_not_fetched_again",
    ],
    "remote/test_push_pull.py": ["test_damage_at_the_address_names_field_and_rows"],
    "splitting/test_filled_splits.py": [
        "test_after_a_kill_no_present_row_is_computed_again",
        "test_a_transform_does_not_replace_the_random_part_of_a_dataset_unsaid",
        "test_one_line_stores_images_in_the_form_that_keep_names",
    ],
    "splitting/test_generators.py": ["test_a_package_outside_of_the_environment_is_installed_too"],
    "splitting/test_judge.py": [
        "test_a_rare_branch_that_is_dropped_from_jittered_images_is_seen",
        "test_an_invariant_is_checked",
        "test_draws_that_a_batch_shares_are_seen",
        "test_the_same_seed_gives_the_same_verdict",
    ],
    "splitting/test_split.py": ["test_the_choice_of_a_store_is_that_of_later_calls"],
    "store/test_hostile.py": ["test_changes_at_random"],
    "system/test_compiled.py": ["test_a_fork_waits_for_them"],
    "system/test_progress.py": ["test_a_program_without_a_terminal_gets_lines"],
    "test_device_benchmark.py": ["test_every_part_runs_on_a_device"],
    "test_inputs_page.py": ["test_the_page_is_up_to_date"],
    "torture/test_faults.py": ["test_other_refusals_are_told"],
    "torture/test_torture.py": [
        "test_a_repair_is_left_in_order",
        "test_another_takes_over_while_workers_of_the_dead_builder_live_on",
    ],
    "transforms/test_compiled_passes.py": ["test_no_byte_outside_of_the_image_is_read"],
    "transforms/test_kernel.py": ["test_they_compile_for_three_architectures"],
    "transforms/test_pointwise.py": ["test_copies_and_repr"],
    "verdict/test_bench.py": [
        "test_a_step_that_takes_all_the_time",
        "test_data_that_is_read_once",
        "test_random_samples_say_what_is_kept_in_their_place",
        "test_reading_that_takes_all_the_time",
        "test_what_does_not_fit_in_memory_is_measured_cold",
        "test_without_a_step_it_cannot_tell",
        "test_workers_that_fail_are_not_measured",
    ],
}
"""By file: the tests that take longest, of several processes, failing disks and benchmarks. `make test-long` runs them.

In `make test` others of their files show the same rules in a short form.
"""


EXAMPLES_SHARE, LEAST_EXAMPLES = 5, 6
"""`make test` draws a fifth of the examples of hypothesis, others in every run. `make test-long` draws all of them."""


def mark_long_cases(items: list[pytest.Item], root: Path, short: bool) -> None:
    """Give the mark ``long`` to the tests in ``LONG``, and to the cases that ``EACH`` leaves to ``make test-long``.

    Of hypothesis a ``short`` run has fewer examples. Another one has the same tests once more, with all of them.
    """
    seen: Counter[tuple[str, str]] = Counter()
    shortened: set[object] = set()
    for item in items:
        if item.get_closest_marker("long") is not None:
            continue
        name = item.name.partition("[")[0]
        file = item.path.relative_to(root).as_posix()
        each = EACH.get(file, {}).get(name, 1)
        if name in LONG.get(file, []) or seen[file, name] % each:
            item.add_marker(pytest.mark.long)
        seen[file, name] += 1
        if (holder := _holder_of_settings(item)) is None or file.startswith("cuda/"):
            continue
        if not short:
            item.add_marker(pytest.mark.long)
        elif holder not in shortened:
            shortened.add(holder)
            _shorten(*holder)


def _holder_of_settings(item: pytest.Item) -> tuple[Any, str] | None:
    """Return the object that has the settings of a test of hypothesis, and the attribute; None for another test."""
    case, test = getattr(item, "cls", None), getattr(item, "obj", None)
    if isinstance(getattr(case, "settings", None), hypothesis.settings):  # the TestCase of a state machine
        return case, "settings"
    return (getattr(test, "__func__", test), SETTINGS_OF_TEST) if hasattr(test, "hypothesis") else None


SETTINGS_OF_TEST = "_hypothesis_internal_use_settings"


def _shorten(holder: Any, attribute: str) -> None:
    full = getattr(holder, attribute)
    count = min(full.max_examples, max(full.max_examples // EXAMPLES_SHARE, LEAST_EXAMPLES))
    setattr(holder, attribute, hypothesis.settings(full, max_examples=count))
