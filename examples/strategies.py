"""Train a small transformer under any strategy: only the text says which.

Run:  torchrun --nproc-per-node 2 examples/strategies.py --strategy fsdp
Then: torchrun --nproc-per-node 4 examples/strategies.py --strategy tp:2,fsdp --steps 80
"""

from __future__ import annotations

import argparse

import torch
from transformer import Transformer, batch, loss_of

from ckptkit.live import Checkpointer
from ckptkit.parallel import as_distributed

# How tensor parallelism cuts the model: the same rules that `ckpt reshard --rules` takes.
RULES = {
    "rules": [
        {"match": ["embed.weight", "re:.*\\.([qkv]|up)\\.(weight|bias)"], "tp": "shard(0)"},
        {"match": "re:.*\\.(o|down)\\.weight", "tp": "shard(1)"},
        {"match": "*", "tp": "replicate"},
    ]
}


def main() -> None:
    """Train up to a step, from the newest one that any strategy saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp", help="ddp, zero1, fsdp, tp:2,fsdp, pp:2, …")
    parser.add_argument("--dir", default="runs/strategies")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    dist = as_distributed(
        Transformer(),
        args.strategy,
        optimizer=torch.optim.AdamW,
        optimizer_options={"lr": 0.01},
        rules=RULES,
        example=batch(0)[0][:2],  # pipelines are tried out on it
    )
    with Checkpointer(args.dir, keep_last=2) as ckpt:
        restored = ckpt.restore(**dist.state)
        start = restored.step if restored else 0
        for step in range(start + 1, args.steps + 1):
            letters, targets = dist.share(batch(step))
            loss = dist.step(loss_of, (letters, targets))
            if step % 10 == 0:
                ckpt.save(step, **dist.state)
                share = dist.memory().optimizer.share  # asked on every rank
                if torch.distributed.get_rank() == 0:
                    print(f"step {step}, {dist.strategy}: loss {float(loss):.3f}", end=", ")
                    print(f"{share:.0%} of the optimizer state here", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
