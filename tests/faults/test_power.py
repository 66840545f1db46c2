"""After a power cut nothing is lost: no charge, no checkpoint, and the run goes on by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dpsparse.budget import WRITE_AHEAD
from tests.faults.power import cut_again_and_again
from tests.support.cut_disk import CutDisk, why_no_loop
from tests.support.lossy_disk import LossyDisk, why_no_fuse

FORGETFUL = pytest.mark.skipif(bool(why_no_fuse()), reason=f"no lossy disk: {why_no_fuse()}")
REAL = pytest.mark.skipif(bool(why_no_loop()), reason=f"no disk image: {why_no_loop()}")


@FORGETFUL
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "mechanism"), [(1, "lazydp"), (2, "adafest")])
def test_a_disk_that_forgets_loses_no_charge(
    tmp_path: Path, world_size: int, mechanism: str
) -> None:
    with LossyDisk() as disk:
        tally = cut_again_and_again(
            disk, tmp_path, 2, 7, world_size, mechanism=mechanism, steps=40, save_every=5
        )
    assert tally.cuts == 2
    assert tally.largest_overcharge <= WRITE_AHEAD


@FORGETFUL
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_disk_that_forgets_loses_no_charge_in_many_cuts(tmp_path: Path, seed: int) -> None:
    with LossyDisk() as disk:
        tally = cut_again_and_again(disk, tmp_path, 10, seed, steps=150, save_last=True)
    assert tally.largest_overcharge <= WRITE_AHEAD


@REAL
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_ext4_loses_no_charge(tmp_path: Path, seed: int) -> None:
    with CutDisk("ext4") as disk:
        tally = cut_again_and_again(disk, tmp_path, 5, seed, steps=150)
    assert tally.largest_overcharge <= WRITE_AHEAD
