"""Readers and the generator: what they make of a line, and what they say of a bad one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loka_sim.datasets import Batch, open_dataset
from loka_sim.datasets.base import FrequentOnly, frequent, hashed
from loka_sim.errors import DataError, UserError
from loka_sim.inputs import InputShape

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_criteo = pytest.mark.skipif(not (REAL / "criteo_sample").is_dir(), reason="no Criteo sample beside the checkout")
needs_movielens = pytest.mark.skipif(not (REAL / "ml-100k").is_dir(), reason="no MovieLens-100k beside the checkout")


def criteo_line(label="1", counts=("3",) * 13, categories=("1f89b562",) * 26) -> str:
    return "\t".join((label, *counts, *categories)) + "\n"


def write(folder: Path, text: str, name: str = "train.tsv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_a_criteo_line_is_read_as_documented(tmp_path):
    counts = ("0", "", "-2", "7", *("1",) * 9)
    categories = ("", "0000000a", *("80e26c9b",) * 24)
    write(tmp_path, criteo_line(counts=counts, categories=categories), "dev.tsv")
    write(tmp_path, criteo_line("0"))
    batch = open_dataset("criteo", tmp_path, "dev").read()
    assert batch.labels.tolist() == [1.0]
    np.testing.assert_allclose(batch.dense[0, :5], [0, 0, 0, np.log(8), np.log(2)], rtol=1e-6)
    assert batch.ids[0, 0] == 0 and (batch.ids[0, 1:] > 0).all() and (batch.ids < 2048).all()
    # 44 tokens: 5 of padding, 13 counts, 26 categories; what is missing is padding too.
    assert np.flatnonzero(batch.sequence[0] == 0).tolist() == [0, 1, 2, 3, 4, 6, 18]
    assert len(set(batch.sequence[0, 20:].tolist())) == 24  # one value in 24 columns: 24 tokens


def test_criteo_is_hashed_to_the_tables(tmp_path):
    write(tmp_path, "".join(criteo_line(categories=(f"{i:08x}",) * 26) for i in range(500)))
    shape = InputShape(rows=(2, 50, *(1000,) * 24), sequence_rows=30, sequence_length=10)
    dataset = open_dataset("criteo", tmp_path, shape=shape)
    batch = dataset.read()
    assert batch.ids.max(axis=0)[:2].tolist() == [1, 49] and batch.ids.min() == 1
    assert batch.sequence.shape == (len(batch), 10) and batch.sequence.max() == 29
    assert len(np.unique(batch.ids[:, 2])) > 300  # 450 values in 999 places: 362 expected


def test_without_a_dev_file_every_tenth_line_is_held_out(tmp_path):
    write(tmp_path, "".join(criteo_line(counts=(str(i), *("1",) * 12)) for i in range(25)))
    numbers = {split: np.expm1(open_dataset("criteo", tmp_path, split).read().dense[:, 0]) for split in ("train", "dev")}
    assert numbers["dev"].round().astype(int).tolist() == [9, 19]
    assert len(numbers["train"]) == 23


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1\t2\t3\n", r"train.tsv:2: 3 columns, expected 40 \(label, 13 counts, 26 categories, tab-separated\); mend or drop"),
        (criteo_line("2"), r"train.tsv:2: label is '2', expected 0 or 1"),
        (criteo_line(counts=("1", "x", *("1",) * 11)), r"train.tsv:2: column 3 is 'x', expected an integer"),
        (criteo_line(categories=("zz", *("0a",) * 25)), r"train.tsv:2: column 15 is 'zz', expected hexadecimal"),
        (criteo_line(categories=("-1", *("0a",) * 25)), r"train.tsv:2: column 15 is '-1', expected hexadecimal"),
        (criteo_line(counts=("9" * 40, *("1",) * 12)), r"train.tsv:2: column 2 is '9{32}', expected an integer"),
    ],
)
def test_a_malformed_criteo_line_is_named(tmp_path, line, complaint):
    write(tmp_path, criteo_line() + line)
    write(tmp_path, criteo_line(), "dev.tsv")
    with pytest.raises(DataError, match=complaint) as caught:
        open_dataset("criteo", tmp_path).read()
    assert "\n" not in str(caught.value)


def test_missing_data_are_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("LOKA_SIM_CRITEO", raising=False)
    with pytest.raises(DataError, match=r"^no Criteo data given; pass its path or set LOKA_SIM_CRITEO$"):
        open_dataset("criteo")
    monkeypatch.setenv("LOKA_SIM_CRITEO", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere; pass another path or set LOKA_SIM_CRITEO$"):
        open_dataset("criteo")
    with pytest.raises(DataError, match=r"has no train.tsv or train.txt"):
        open_dataset("criteo", tmp_path)
    with pytest.raises(UserError, match=r"^unknown dataset 'avazu'; choose from criteo, movielens, synthetic$"):
        open_dataset("avazu")
    with pytest.raises(UserError, match=r"^unknown split 'test'; choose from train, dev$"):
        open_dataset("synthetic", split="test")
    write(tmp_path, "")
    with pytest.raises(DataError, match="criteo has no samples"):
        open_dataset("criteo", tmp_path).read()
    (tmp_path / "train.tsv").write_bytes(b"\x1f\x8b\xff\xfe")
    with pytest.raises(DataError, match="is not text"):
        open_dataset("criteo", tmp_path).read()


def test_criteo_refuses_a_model_of_another_shape(tmp_path):
    write(tmp_path, criteo_line())
    with pytest.raises(UserError, match=r"Criteo has 13 counts and 26 fields, the model 3 and 26"):
        open_dataset("criteo", tmp_path, shape=InputShape(dense=3))


@needs_criteo
def test_the_criteo_sample():
    train, dev = (open_dataset("criteo", REAL / "criteo_sample", split).read() for split in ("train", "dev"))
    assert (len(train), len(dev)) == (7200, 409)
    assert train.labels.sum() == 1549 and dev.labels.sum() == 93
    lines = (REAL / "criteo_sample" / "train.tsv").read_text().splitlines()
    first = lines[0].split("\t")
    expected = [np.log1p(max(float(text), 0.0)) if text else 0.0 for text in first[1:14]]
    np.testing.assert_allclose(train.dense[0], expected, rtol=1e-6)
    empty = np.array([[not text for text in line.split("\t")[14:]] for line in lines])
    np.testing.assert_array_equal(train.ids == 0, empty)


MOVIES = {
    "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "a\tx\t5\t10\nb\tx\t1\t20\na\ty\t3\t30\na\tz\t4\t40\nb\ty\t4\t50\na\tx\t2\t60\n",
    "item": "item_id:token\tclass:token_seq\nx\tDrama War\ny\tDrama\nz\tWar\n",
    "user": "user_id:token\tage:token\na\t30\nb\t41\n",
}


def movies(folder: Path, **changed: str) -> Path:
    for kind, text in (MOVIES | changed).items():
        (folder / f"ml.{kind}").write_text(text)
    return folder


def test_movielens_histories_and_labels(tmp_path):
    from loka_sim.datasets import MovieLensDataset

    dataset = MovieLensDataset(movies(tmp_path), "train", sequence_length=3, dev_share=0.0)
    batch = dataset.read()
    assert batch.labels.tolist() == [1, 0, 0, 1, 1, 0]
    # The user's clicked films before each rating; x, y, z are rows 0, 1, 2 of the item file, so ids 1, 2, 3.
    assert batch.sequence.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 1, 3]]
    np.testing.assert_allclose(batch.dense[5], [1.0, np.log(4), 2 / 3], rtol=1e-6)
    assert dataset.shape == InputShape(3, (3, 3, 4, 4), 4, 3)
    held_out = MovieLensDataset(tmp_path, "dev", dev_share=0.4).read()
    assert held_out.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("inter", MOVIES["inter"] + "a\tx\n", r"ml.inter:8: 2 columns, expected 4"),
        ("inter", MOVIES["inter"].replace("\t40\n", "\tlate\n"), r"ml.inter:5: timestamp is 'late', expected a number"),
        ("inter", MOVIES["inter"].replace("b\tx", "c\tx"), r"ml.inter:3: user_id 'c' is not in ml.user; add it there"),
        ("inter", MOVIES["inter"].replace("rating:float", "stars:float"), r"ml.inter:1: no column 'rating'"),
        ("item", "item_id\nx\n", r"ml.item:1: expected a header of name:type columns"),
        ("user", "", r"ml.user:1: expected a header"),
    ],
)
def test_malformed_movielens_is_named(tmp_path, kind, text, complaint):
    with pytest.raises(DataError, match=complaint):
        open_dataset("movielens", movies(tmp_path, **{kind: text}))


def test_movielens_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"has 0 .inter files"):
        open_dataset("movielens", tmp_path)
    movies(tmp_path)
    (tmp_path / "ml.user").unlink()
    with pytest.raises(DataError, match=r"ml.user is missing"):
        open_dataset("movielens", tmp_path)


@needs_movielens
def test_movielens_100k():
    train, dev = (open_dataset("movielens", REAL / "ml-100k", split) for split in ("train", "dev"))
    assert (len(train.read()), len(dev.read())) == (90_000, 10_000)
    assert train.shape.rows[:2] == (944, 62) and train.shape.sequence_rows == 1683
    assert train.read().labels.sum() + dev.read().labels.sum() == 55_375  # ratings of 4 and 5


def test_synthetic_data_have_criteos_shape():
    batch = open_dataset("synthetic", rows=20_000).read()
    assert batch.dense.shape == (20_000, 13) and batch.ids.shape == (20_000, 26)
    assert 0.15 < batch.labels.mean() < 0.35
    counts = np.expm1(batch.dense.astype(np.float64))
    assert all(column.max() > 20 * np.median(column[column > 0]) for column in counts.T)  # heavy tails
    for column in batch.ids.T:
        seen = np.sort(np.bincount(column[column > 0]))[::-1]
        ratio = seen[0] / seen[1]
        assert 1.5 < ratio < 3.6  # a power law with an exponent of 1.05 to 1.6, in cells of an integer's width
        assert seen[0] > 20 * seen[min(100, len(seen) - 1)]


def test_synthetic_data_have_something_to_learn():
    train, dev = (open_dataset("synthetic", rows=40_000, split=split).read() for split in ("train", "dev"))
    # Naive Bayes of categories: a reference that no code under test shares.
    rate = train.labels.mean()
    score = np.zeros(len(dev))
    for field in range(26):
        clicks = np.bincount(train.ids[:, field], train.labels, 2048) + 10 * rate
        total = np.bincount(train.ids[:, field], minlength=2048) + 10
        score += np.log(clicks / total)[dev.ids[:, field]]
    positive, negative = score[dev.labels > 0], score[dev.labels == 0]
    assert (positive[:, None] > negative[None]).mean() > 0.65


def test_synthetic_data_repeat_however_they_are_chunked():
    dataset = open_dataset("synthetic", rows=9_000, seed=3)
    whole = dataset.read()
    pieces = Batch.join(list(dataset.chunks(1_000)))
    assert len(whole) == 9_000
    for name in ("dense", "ids", "sequence", "labels"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))
    assert not np.array_equal(whole.ids, open_dataset("synthetic", rows=9_000, seed=4).read().ids)
    assert not np.array_equal(whole.ids[:900], open_dataset("synthetic", rows=9_000, split="dev", seed=3).read().ids)
    with pytest.raises(UserError, match="synthetic rows = 0"):
        open_dataset("synthetic", rows=0)


def test_batches_are_a_shuffled_pass():
    dataset = open_dataset("synthetic", rows=1_000)
    whole = dataset.read()
    batches = list(dataset.batches(96, seed=1))
    assert [len(batch) for batch in batches] == [96] * 10
    keys = {tuple(row) for row in whole.dense}
    seen = [tuple(row) for batch in batches for row in batch.dense]
    assert len(set(seen)) == 960 and set(seen) <= keys
    assert seen != [tuple(row) for row in whole.dense[:960]]
    ordered = Batch.join(list(dataset.batches(96)))
    np.testing.assert_array_equal(ordered.ids, whole.ids[:960])
    # A buffer smaller than the set loses nothing either.
    np.testing.assert_array_equal(Batch.join(list(dataset.batches(96, buffer=100))).ids, whole.ids[:960])
    with pytest.raises(DataError, match="fewer samples than one batch of 2000"):
        list(dataset.batches(2_000))


def test_rare_ids_count_as_missing():
    dataset = open_dataset("synthetic", rows=2_000)
    plain, filtered = dataset.read(), FrequentOnly(dataset, frequent(dataset, 5)).read()
    for field in range(26):
        counts = np.bincount(plain.ids[:, field], minlength=2048)
        expected = np.where(counts[plain.ids[:, field]] >= 5, plain.ids[:, field], 0)
        np.testing.assert_array_equal(filtered.ids[:, field], expected)
    assert 0 < (filtered.sequence == 0).sum() - (plain.sequence == 0).sum()


def test_hash_spreads_evenly():
    places = np.bincount(hashed(np.arange(100_000), 101), minlength=101)
    assert places[0] == 0 and places[1:].min() > 850 and places[1:].max() < 1150
