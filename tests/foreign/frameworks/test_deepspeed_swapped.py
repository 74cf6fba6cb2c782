"""Files of DeepSpeed under each other's names, or of another save, that say the same of themselves:
their elements tell.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.errors import FormatError
from tests.foreign.frameworks.deepspeed_folders import tag_of, written_as
from tests.foreign.frameworks.test_deepspeed_damaged import (
    changed,
    files_of,
    of_optimizer,
    weights,
)


def swapped(place: Path, one: str, other: str) -> None:
    """Give two files each other's names, and say so in them."""
    data = (place / one).read_bytes()
    written_as(place / one, (place / other).read_bytes(), other)
    written_as(place / other, data, one)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("zero1", "of one length"),
        ("zero2", "of one length"),
        ("zero2-three", "are not the copies in mp_rank_00"),
        ("zero3", "only padding"),
        ("zero3-three", "only padding"),
    ],
)
def test_the_optimizers_of_two_ranks_under_each_others_names_are_refused(
    case: str, what: str, written: Path, tmp_path: Path
) -> None:
    """Also where nothing that the files say of themselves differs, as of gradients by turns."""
    place = Path(shutil.copytree(tag_of(written / case), tmp_path / case))
    names = [file.name for file in files_of(place, "optim")]
    # The last rank of stage 2 has less, that of stage 3 has padding.
    one, other = names[:2] if case == "zero2-three" else (names[0], names[-1])
    swapped(place, one, other)
    with pytest.raises(FormatError, match=what) as caught:
        ckptkit.open(place)
    assert one in str(caught.value)
    if what != "of one length":
        assert other in str(caught.value)


@pytest.mark.parametrize(
    ("case", "model"),
    [
        ("zero1", "mp_rank_00"),
        ("zero1-bf16", "mp_rank_00"),
        ("zero2", "mp_rank_00"),
        ("zero2-fp16", "mp_rank_00"),
        ("zero2-aligned", "mp_rank_00"),
        ("tp", "mp_rank_00"),
        ("pipe", r"layer_0\d"),
        ("pipe-bf16", r"layer_0\d"),
    ],
)
def test_ranks_that_have_each_others_weights_are_refused(
    case: str, model: str, written: Path, stand_ins: None, tmp_path: Path
) -> None:
    """As their files are where all have the same sizes, which such a small model has not."""
    place = Path(shutil.copytree(tag_of(written / case), tmp_path / case))
    files = sorted(place.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"))
    trees = [torch.load(file, weights_only=False) for file in files]
    for rows in zip(*(weights(tree["optimizer_state_dict"]) for tree in trees), strict=True):
        one, other = (row.detach() for row in rows)
        count = min(len(one), len(other))
        kept = one[:count].clone()
        one[:count] = other[:count]
        other[:count] = kept
    for file, tree in zip(files, trees, strict=True):
        torch.save(tree, file)
    with pytest.raises(FormatError, match=f"are not the copies in {model}") as caught:
        ckptkit.open(place)
    assert all(file.name in str(caught.value) for file in files)


@pytest.mark.parametrize("case", ["zero1", "zero1-bf16", "zero2", "zero2-three", "zero2-fp16"])
def test_a_model_of_another_save_is_refused(
    case: str, written: Path, stand_ins: None, tmp_path: Path
) -> None:
    """A later one may say the same of itself, but for its weights: one element is enough."""
    place = Path(shutil.copytree(tag_of(written / case), tmp_path / case))

    def train(tree: Any) -> None:
        tree["module"]["up.weight"].detach()[-1, -1] += 0.01

    changed(place / "mp_rank_00_model_states.pt", train)
    with pytest.raises(FormatError, match="are not the copies in mp_rank_00_model") as caught:
        ckptkit.open(place)
    assert "optim_states.pt" in str(caught.value)
    assert "Named by itself" in str(caught.value)
    with ckptkit.open(place / "mp_rank_00_model_states.pt") as checkpoint:
        assert "model/up.weight" in checkpoint.arrays


def test_weights_that_are_no_numbers_are_equal_to_their_copies(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "zero2-fp16"), tmp_path / "x"))
    bad = torch.tensor([float("nan"), float("inf"), 1e9])
    changed(
        place / "mp_rank_00_model_states.pt",
        lambda tree: tree["module"]["embed.weight"].detach().view(-1)[:3].copy_(bad),
    )
    changed(
        place / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        of_optimizer(lambda said, _: weights(said)[0].detach()[:3].copy_(bad)),
    )
    ckptkit.open(place).close()


def test_the_file_of_rank_0_is_known_by_what_only_it_says(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "zero3"), tmp_path / "x"))
    names = [file.name for file in files_of(place, "model")]
    swapped(place, names[0], names[1])
    with pytest.raises(FormatError, match="as only the file of rank 0 does") as caught:
        ckptkit.open(place)
    assert names[1] in str(caught.value)
