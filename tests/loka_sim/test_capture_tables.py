"""Which sites a capture finds to read embedding tables, and which may run before they are there."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_sim.capture import capture
from loka_sim.modelspec import ModelSpec

pytestmark = pytest.mark.usefixtures("gemms_alone")


class TwoTowers(nn.Module):
    """A dense tower, a bag of rows, a product of both, a head; the head may be checkpointed."""

    def __init__(self, again=False, tables=True):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16))
        self.bag = nn.EmbeddingBag(1000, 16) if tables else None
        self.side = nn.Linear(16, 16)
        self.head = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))
        self.again = again

    def forward(self, dense, ids):
        dense = self.bottom(dense)
        rows = self.bag(ids) if self.bag is not None else torch.ones_like(dense)
        scores = torch.bmm(dense.unsqueeze(1), rows.unsqueeze(2)).flatten(1)
        late = self.side(dense)  # behind a site that reads the table, and reads none itself
        joined = torch.cat([late * scores, rows], dim=1)
        return checkpoint(self.head, joined, use_reentrant=False) if self.again else self.head(joined)


def flags(**options):
    spec = capture(TwoTowers(**options), (torch.zeros(64, 13), torch.zeros(64, 5, dtype=torch.long)))
    return spec, {site.name: site.reads_tables for site in spec.sites}


@pytest.mark.parametrize("again", [False, True])
def test_what_is_made_from_rows_of_tables_reads_them(again):
    spec, found = flags(again=again)
    expected = {"bottom.0": False, "bottom.2": False, "(root)": True, "side": False, "head.0": True, "head.2": True}
    assert {name: reads for name, reads in found.items() if "#recompute" not in name} == expected
    assert all(reads for name, reads in found.items() if "#recompute" in name) and any("#" in name for name in found) == again
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    written = {site["name"]: site.get("reads_tables", True) for site in spec.to_dict()["sites"]}
    assert written == found


def test_without_tables_nothing_is_told_apart():
    assert all(flags(tables=False)[1].values())


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(1000, 64, mode="sum"), nn.Linear(64, 16)

    def forward(self, ids, offsets):
        return self.out(self.table(ids, offsets))


def test_of_ids_and_offsets_alone_the_offsets_are_the_batch():
    for inputs in ((torch.arange(320), torch.arange(0, 320, 5)), {"offsets": torch.arange(0, 320, 5), "ids": torch.arange(320)}):
        spec = capture(Bag(), inputs)
        assert spec.batch == 64 and spec.sites[0].passes["output"].shape(128) == (128, 16, 64)
        assert spec.tables[0].lookups == 5 and not spec.unaccounted


def test_a_batch_that_no_gemm_depends_on_is_named():
    (said,) = capture(Bag(), (torch.arange(320), torch.arange(0, 320, 5)), batch=320).unaccounted
    assert said.startswith("a batch that GEMMs depend on: it was taken to be 320")
