"""Names that mean something of their own in a step (FORMAT sections 8 and 11)."""

from __future__ import annotations

MODEL = "model"
OPTIMIZER = "optimizer"
# What a training job says of arrays again, under some strategies only: `alike/<name>`.
ALIKE = "alike"
# How the arrays `<name>%2F<part>` make the tensor that a training job had at `<name>`:
# `wrapped/<name>`.
WRAPPED = "wrapped"
# What only some ranks have in a nested dictionary: `own/<group>/<path>`.
OWN = "own"
# The one key of a map that stands for the array of that name.
REFERENCE = "ckptkit.array"
# The one key of a map around a value of one share of the data: [which, of how many or None, value].
DATA_RANK = "ckptkit.data_rank"

DIGEST_ALGORITHM = "xxh3-128"
