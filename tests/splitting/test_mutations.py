"""Datasets that were changed at random: none gives other samples than the dataset, unless it is refused."""

from collections import Counter

import pytest
from judge import judge
from mutations import mutant

SHORT, LONG = 15, 300
RAREST = 1 / 64  # of the rows or draws that a change touches: what is rarer may go unseen


def check_all(numbers, folder, draws, rarest=RAREST):
    """Return how many datasets are right, refused, wrong; fail with the source of those that are wrong."""
    counts, wrong = Counter(), []
    for number in numbers:
        changed = mutant(number)
        verdict = judge(changed.make, folder / f"{number}.mf", draws=draws)
        is_rare = bool(verdict.wrong) and changed.rate < rarest
        counts["rare" if is_rare else "wrong" if verdict.wrong else verdict.kind] += 1
        if verdict.kind == "crash" or (verdict.wrong and not is_rare):
            wrong.append(f"{changed}\nfound {verdict}\n{changed.source}")
    print(dict(counts))
    assert not wrong, f"{len(wrong)} of {sum(counts.values())} datasets ({dict(counts)}):\n" + "\n".join(wrong)
    return counts


def test_no_changed_dataset_is_silently_wrong(tmp_path):
    check_all(range(SHORT), tmp_path, 256)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, LONG, 30))
def test_no_changed_dataset_of_many_is_silently_wrong(first, tmp_path):
    check_all(range(first, first + 30), tmp_path, 1024)


def test_numbers_give_other_datasets_and_the_same_each_time():
    assert mutant(3) == mutant(3)
    assert len({mutant(number).source for number in range(LONG)}) > LONG * 0.8


@pytest.mark.parametrize("first", range(0, LONG, 100))
def test_changed_datasets_can_be_read(first):
    for number in range(first, first + 100):
        dataset = mutant(number).make()
        assert len(dataset) >= 64
        for row in (0, 33, 63):
            dataset[row]
