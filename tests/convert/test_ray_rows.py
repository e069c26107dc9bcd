"""The rows of a ray.data.Dataset, without Ray."""

from types import SimpleNamespace

from memfeed.convert.inputs import RayRows


def test_rows_come_in_the_order_of_the_source_each_time():
    execution = SimpleNamespace(preserve_order=False)
    dataset = SimpleNamespace(
        context=SimpleNamespace(execution_options=execution), iter_rows=lambda: iter([{"a": 1}, {"a": 2}])
    )
    rows = RayRows(dataset)
    assert execution.preserve_order
    assert list(rows) == list(rows) == [{"a": 1}, {"a": 2}]
