"""Write checkpoints with Orbax: `write_orbax.py OUT`.

Of each checkpoint `OUT/<name>`, `OUT/<name>.npz` has what Orbax itself restores from it, by the
names that ckptkit gives it. Tried with Orbax 0.12.8 and JAX 0.10.2.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

Tree = dict[str, Any]


def mesh_of(*names: str) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2), names)


def random(mesh: Mesh, seed: int, shape: tuple[int, ...], *spec: Any, dtype: Any = None) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    array = jax.make_array_from_callback(shape, sharding, lambda index: values[index])
    return array.astype(dtype) if dtype else array


def parameters(mesh: Mesh) -> Tree:
    data, model = mesh.axis_names
    return {
        "embed": {"embedding": random(mesh, 1, (16, 6), model)},
        "layers": [
            {
                "kernel": random(mesh, 10 + layer, (8, 12), data, model),
                "bias": random(mesh, 20 + layer, (12,), None, dtype=jnp.bfloat16),
            }
            for layer in range(2)
        ],
        "scale": random(mesh, 3, (8, 2), (data, model)),
    }


def trained(mesh: Mesh) -> Tree:
    """A state as Flax has it, after a step of AdamW."""
    params = parameters(mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimizer.init(params)
    gradients = jax.tree.map(lambda p: (p * 0.5).astype(p.dtype), params)
    updates, state = jax.jit(optimizer.update)(gradients, state, params)
    return {"params": optax.apply_updates(params, updates), "opt_state": state, "step": 7}


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    own = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}.get(array.dtype.name)
    return array.view(own) if own else array


def named(tree: Tree) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a state by the names that ckptkit gives them."""
    found = {}
    for path, value in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(value, (jax.Array, np.ndarray)):
            continue
        top, _, rest = name.partition(".")
        parts = name.split(".")
        if top == "params":
            found[f"model/{rest}"] = as_numpy(value)
        elif "mu" in parts or "nu" in parts:
            at = parts.index("mu" if "mu" in parts else "nu")
            found[f"optimizer/{'.'.join(parts[at + 1 :])}/{parts[at]}"] = as_numpy(value)
        else:
            found[f"other/{name}"] = as_numpy(value)
    return found


def keep(root: Path, name: str, tree: Tree) -> None:
    arrays = named(tree)
    np.savez_compressed(root / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def manager(root: Path) -> None:
    """A step of a run: a state, and a document."""
    state = trained(mesh_of("data", "model"))
    with ocp.CheckpointManager(root / "manager") as run:
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave({"loss": 3.5})
        )
        run.save(7, args=items)
        run.wait_until_finished()
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(state))
        restored = run.restore(7, args=wanted)["state"]
    keep(root, "manager", restored)


def sorts() -> Tree:
    """Values of all sorts."""
    params = parameters(mesh_of("replica", "fsdp"))
    return {
        "params": params,
        "key": jax.random.key(3),
        "eight": jnp.arange(12, dtype=jnp.float32).reshape(3, 4).astype(jnp.float8_e4m3fn),
        "waves": jnp.arange(5, dtype=jnp.complex64) * 2j,
        "flags": np.array([[True, False, True]]),
        "scalar": jnp.float32(3.5),
        "zeros": jnp.zeros((64,)),
        "table": np.arange(35, dtype=np.int64).reshape(7, 5),
        "nested": {"text": "a/b", "rate": 0.25, "nothing": None, "empty": {}},
        "count": 4,
    }


def saved(root: Path, name: str, tree: Tree, *, chunk_bytes: int | None = None, **how: Any) -> None:
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=chunk_bytes), tree)
    handler = ocp.PyTreeCheckpointHandler(**how)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(root / name, args=ocp.args.PyTreeSave(tree, save_args=args))
        restored = checkpointer.restore(
            root / name,
            args=ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            ),
        )
    keep(root, name, restored)


def bare(root: Path) -> None:
    """A model as people publish one, by the newer interface."""
    params = {"embed": np.arange(12.0).reshape(4, 3), "norm": {"scale": np.ones(3, np.float32)}}
    v1.save_pytree(root / "bare", params, custom_metadata={"made": "by hand"})
    keep(root, "bare", {"params": v1.load_pytree(root / "bare")})


def processes(root: Path) -> None:
    """Two processes, each with two devices: each writes a database of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, str(root)]
    ranks = [subprocess.Popen([*command, str(rank), port]) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]


def process(root: Path, rank: int, port: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    tree = {"params": parameters(mesh_of("fsdp", "tensor"))}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "processes", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(root / "processes", tree)
    whole = jax.tree.map(
        lambda array: multihost_utils.process_allgather(array, tiled=True), restored
    )
    if rank == 0:
        keep(root, "processes", whole)


def main() -> None:
    root = Path(sys.argv[1]).absolute()
    root.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 if len(sys.argv) == 2 else 2)
    if len(sys.argv) > 2:
        process(root, int(sys.argv[2]), sys.argv[3])
        return
    manager(root)
    saved(root, "files", sorts(), chunk_bytes=96, use_ocdbt=False, use_zarr3=True)
    saved(root, "files2", sorts(), use_ocdbt=False, use_zarr3=False)
    saved(root, "database3", sorts(), chunk_bytes=96, use_ocdbt=True, use_zarr3=True)
    bare(root)
    processes(root)


if __name__ == "__main__":
    main()
