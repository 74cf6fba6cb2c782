"""What torch's optimizers lack: compressed gradients, asynchronous SGD, elastic training.

Three stories. `compression` takes the gradients from DDP or `fully_shard` and sends them over a
wire that counts; `methods` are the ways to send fewer bytes. `asynchronous` is a worker that pushes
gradients and pulls parameters, and who answers it. `elastic` is a loop that goes on with as many
ranks as there are, and the order of samples that it then keeps.
"""

from __future__ import annotations
