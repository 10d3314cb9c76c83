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
