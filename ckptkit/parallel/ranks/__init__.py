"""One interface to the ranks of a job, and what carries its messages.

A `Communicator` moves tensors of any size by the training's own collectives, in the thread that
trains. `ckptkit.checkpoint.ranks.Ranks` says a few plain values over a store, a folder or memory,
without torch: so a save in the background can agree while the training communicates, and a rank
that fails can tell the others, which no collective can.
"""

from __future__ import annotations
