from hypothesis import given
from hypothesis import strategies as st

from memfeed.order.pieces import RankShards

sizes = st.integers(1, 60), st.integers(1, 9), st.integers(1, 5)


def taken(steps: RankShards, row: int = 0, most: int = 3) -> list[tuple[int, list[int]]]:
    """Each step as (rows read by all ranks behind it, positions this rank reads)."""
    found = []
    for run in steps.runs(row, most):
        assert 1 <= run.steps <= most
        for j in range(run.steps):
            start = run.start + j * run.stride
            found.append((min(run.row + (j + 1) * run.stride, steps.rows), list(range(start, start + run.size))))
    return found


@given(*sizes, st.integers(0, 60))
def test_ranks_share_each_step_and_differ_by_a_row_at_most(rows, batch, world, begin):
    begin = min(begin, rows)
    ranks = [taken(RankShards(rows, batch, rank, world, "uneven"), begin) for rank in range(world)]
    whole = taken(RankShards(rows, batch * world), begin)
    assert [len(rank) for rank in ranks] == [
        RankShards(rows, batch, rank, world, "uneven").count(begin) for rank in range(world)
    ]
    for step, (behind, positions) in enumerate(whole):
        parts = [rank[step][1] if step < len(rank) else [] for rank in ranks]
        assert sum(parts, []) == positions
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert max(map(len, parts)) <= batch
        assert all(rank[step][0] == behind for rank in ranks if step < len(rank))


@given(*sizes)
def test_drop_last_leaves_out_less_than_a_step(rows, batch, world):
    ranks = [RankShards(rows, batch, rank, world, "drop") for rank in range(world)]
    read = sum((positions for steps in ranks for _, positions in taken(steps)), [])
    assert sorted(read) == list(range(ranks[0].end()))
    assert rows - len(read) < batch * world
    assert len({steps.count() for steps in ranks}) == 1


@given(*sizes)
def test_pad_last_gives_every_rank_as_many_batches_of_one_size(rows, batch, world):
    ranks = [RankShards(rows, batch, rank, world, "pad") for rank in range(world)]
    steps = [taken(steps) for steps in ranks]
    assert {len(rank) for rank in steps} == {ranks[0].count()} == {-(-rows // (batch * world))}
    assert {len(positions) for rank in steps for _, positions in rank} == {batch}
    read = sorted(position for rank in steps for _, positions in rank for position in positions)
    assert read == list(range(len(read)))
    assert len(read) >= rows


@given(*sizes, st.integers(1, 5), st.integers(0, 8))
def test_a_place_is_good_for_any_number_of_ranks(rows, batch, world, other, steps):
    """What one number of ranks has read, and another goes on with, is the epoch."""
    before = [taken(RankShards(rows, batch, rank, world, "uneven")) for rank in range(world)]
    steps = min(steps, min(map(len, before)))
    row = before[0][steps - 1][0] if steps else 0
    read = sum((positions for rank in before for _, positions in rank[:steps]), [])
    after = [taken(RankShards(rows, batch, rank, other, "uneven"), row) for rank in range(other)]
    read += sum((positions for rank in after for _, positions in rank), [])
    assert sorted(read) == list(range(rows))


@given(*sizes)
def test_by_default_every_rank_gets_as_many_rows_as_the_others(rows, batch, world):
    """As DistributedSampler: the last step is filled up with positions that stand for the first rows."""
    ranks = [RankShards(rows, batch, rank, world) for rank in range(world)]
    steps = [taken(one) for one in ranks]
    assert len({tuple(len(positions) for _, positions in rank) for rank in steps}) == 1
    assert [len(rank) for rank in steps] == [one.count() for one in ranks]
    read = sorted(position for rank in steps for _, positions in rank for position in positions)
    assert read == list(range(-(-rows // world) * world))
    assert len(read) - rows == ranks[0].repeated < world
