"""What a store keeps beside its columns, in lines."""

from memfeed.store.store_html import LINE_WIDTH, manifest_lines
from support import Made, cache


def lines_of(path, samples=(1, 2), metadata=None, **attributes):
    dataset = Made(list(samples))
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return list(manifest_lines(cache(dataset, path, workers=0, metadata=metadata)._view.manifest))


def test_nothing_is_kept(tmp_path):
    assert lines_of(tmp_path / "a.mf") == []
    assert list(manifest_lines(None)) == []


def test_classes_and_metadata(tmp_path):
    found = lines_of(tmp_path / "a.mf", metadata={"m": 1}, classes=["a", "b"])
    assert found == ["classes: 2: a, b", "metadata m: 1"]


def test_lines_are_cut(tmp_path):
    metadata = {str(i): i for i in range(25)} | {"0": "x" * 500}
    found = lines_of(tmp_path / "a.mf", metadata=metadata, classes=["c" * 500, "d"])
    assert found[-1] == "metadata: 5 more keys"
    assert len(found) == 22
    assert all(len(line) < LINE_WIDTH + 40 for line in found)
    assert len(lines_of(tmp_path / "b.mf", metadata={"k" * 500: 1})[0]) < LINE_WIDTH + 40


def test_samples_that_were_skipped(tmp_path):
    def sample(i):
        if i % 2:
            raise ValueError(i)
        return i

    store = cache(Made(sample, 60), tmp_path / "a.mf", workers=0, on_error="skip")
    (line,) = manifest_lines(store._view.manifest)
    assert line.startswith("samples skipped: 30, dataset indices 1, 3, 5, ")
    assert line.endswith("39, ...")
