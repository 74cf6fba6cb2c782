from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.errors import FormatError
from ckptkit.live import load
from tests.foreign.contract import ForeignContract, Sample
from tests.foreign.jobs import as_numpy, network, trained
from tests.storage.counting import CountingStore


def model() -> dict[str, torch.Tensor]:
    """Tensors of all sorts: views, transposed ones, of one storage, of no elements."""
    torch.manual_seed(1)
    base = torch.randn(6, 8)
    return {
        "plain": base,
        "rows": base[2:5],
        "columns": base[:, 1:4],
        "transposed": torch.randn(5, 7).t(),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "every.second": torch.arange(20)[::2],
        "brain": torch.randn(3, 3).bfloat16(),
        "half": torch.randn(3).half(),
        "eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 65_535], dtype=torch.uint16),
        "flags": torch.tensor([True, False]),
        "waves": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "one.row": torch.randn(1, 9),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "tied": base,
    }


class TestOneFileOfTorch(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        path = tmp_path_factory.mktemp("torch") / "last.ckpt"
        tensors = model()
        torch.save({"state_dict": {**tensors, "w": nn.Parameter(tensors["half"])}}, path)
        tensors["w"] = tensors["half"]
        arrays = {f"model/{name}": as_numpy(tensor) for name, tensor in tensors.items()}
        return Sample(path, arrays, ("last.ckpt",))

    def test_tied_tensors_are_one(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            tied = {alias.name: alias.alias_of for alias in checkpoint.manifest.aliases}
        assert tied == {"model/tied": "model/plain", "model/w": "model/half"}


class TestFilesWithAnIndex(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, tmp_path_factory: pytest.TempPathFactory) -> Sample:
        folder = tmp_path_factory.mktemp("bin")
        tensors = [{"a": torch.randn(3, 4), "b": torch.randn(2)}, {"c": torch.randn(5)}]
        names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        for name, part in zip(names, tensors, strict=True):
            torch.save({**part, "not.in.the.index": torch.ones(1)}, folder / name)
        wanted = {key: names[n] for n, part in enumerate(tensors) for key in part}
        index = {"metadata": {}, "weight_map": wanted}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        arrays = {f"model/{k}": v.numpy() for part in tensors for k, v in part.items()}
        return Sample(folder, arrays, (*names,))

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """What it reads lies between tensors: little of a file whose tensors are large."""
        del sample
        torch.save({"w": torch.ones(1 << 20), "v": torch.ones(1 << 18)}, tmp_path / "a.pt")
        store = CountingStore(ckptkit.open_store(tmp_path))
        ckptkit.open(store).close()
        assert store.bytes_read < 200_000

    def test_the_index_may_be_named_itself(self, sample: Sample) -> None:
        with ckptkit.open(sample.place / "pytorch_model.bin.index.json") as checkpoint:
            assert set(checkpoint.arrays) == set(sample.arrays)


def opened(state: Any, folder: Path, name: str = "a.pt") -> Any:
    torch.save(state, folder / name)
    return ckptkit.open(folder / name)


def objects(checkpoint: Any) -> dict[str, Any]:
    return {item.name: item.value for item in checkpoint.manifest.objects}


def test_an_optimizer_that_counts_its_parameters_gets_their_names(tmp_path: Path) -> None:
    net, optimizer = trained(network())
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    with opened(state, tmp_path) as checkpoint:
        for number, (name, _) in enumerate(net.named_parameters()):
            for key, value in optimizer.state_dict()["state"][number].items():
                found = checkpoint[f"optimizer/{name}/{key}"]
                assert np.array_equal(found[...], value.numpy())
                assert found.info.of == f"model/{name}"
        said = objects(checkpoint)
        assert said["extra/epoch"] == 3
        (document,) = said["optimizer"]
        assert document["kind"] == "AdamW"
        assert document["values"] == {}
        (group,) = document["groups"]
        assert group["params"] == [name for name, _ in net.named_parameters()]
        assert group["options"]["lr"] == 0.01


def test_lightning_keeps_its_optimizers_in_a_list(tmp_path: Path) -> None:
    net, optimizer = trained(network())
    state = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 2}],
        "global_step": 12,
        "pytorch-lightning_version": "2.6.0",
        "loops": {"fit": {"batches": (1, 2)}},
    }
    with opened(state, tmp_path, "last.ckpt") as checkpoint:
        assert checkpoint.step == 12
        assert "optimizer/0.weight/exp_avg" in checkpoint.arrays
        assert objects(checkpoint)["extra/lr_schedulers"] == [{"last_epoch": 2}]


def test_names_of_parameters_count_before_their_order(tmp_path: Path) -> None:
    net = network()
    named = list(net.named_parameters())
    groups: Any = [{"params": named[2:]}, {"params": named[:2], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with opened({"model": net.state_dict(), "optim": optimizer.state_dict()}, tmp_path) as found:
        wanted = optimizer.state[named[0][1]]["momentum_buffer"]
        there = found[f"optimizer/{named[0][0]}/momentum_buffer"]
        assert np.array_equal(there[...], wanted.numpy())
        assert objects(found)["optimizer"][0]["kind"] == "SGD"


def test_where_nobody_knows_whose_state_it_is_it_has_no_name_of_a_parameter(
    tmp_path: Path,
) -> None:
    net = network()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}])
    net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with opened({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path) as it:
        assert not [name for name in it.arrays if name.startswith("optimizer/")]
        assert "other/optimizer/state/0/exp_avg" in it.arrays
        assert "extra/optimizer" in objects(it)


def test_what_fits_nowhere_is_kept_or_named(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2), "version": 3},
        "ema": {"w": torch.ones(2)},
        "rng": [torch.ones(3, dtype=torch.uint8), {"seed": 5}],
        "kinds": {1, 2},
        "device": torch.device("cpu"),
    }
    with opened(state, tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w", "other/ema/w", "other/rng/0"}
        found = objects(checkpoint)
        assert found["extra/model"] == {"version": 3}
        assert found["extra/rng"] == [{"seed": 5}]
        assert found["extra/device"] == "cpu"
        assert checkpoint.details["left_out"].keys() == {"extra/kinds"}


def test_a_flat_dictionary_of_tensors_is_a_model(tmp_path: Path) -> None:
    with opened({"a.b": torch.ones(2)}, tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/a.b"}


class Custom:
    pass


def test_an_object_of_an_unknown_class_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="Custom") as caught:
        opened({"model": {"w": torch.ones(1)}, "config": Custom()}, tmp_path)
    assert str(tmp_path / "a.pt") in str(caught.value)


def rewritten(path: Path, name: str, data: bytes, *, method: int = zipfile.ZIP_STORED) -> Path:
    """The file with other bytes for one of its members, or one more."""
    with zipfile.ZipFile(path) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    top = next(iter(members)).partition("/")[0]
    members[f"{top}/{name}"] = data
    with zipfile.ZipFile(path, "w", method) as archive:
        for each, raw in members.items():
            archive.writestr(each, raw)
    return path


@pytest.mark.parametrize(
    ("member", "data", "what"),
    [
        ("byteorder", b"big", "big-endian"),
        ("constants.pkl", b"", "TorchScript"),
        ("data/0", bytes(7), "a storage of 8 bytes has 7 bytes"),
        ("data/0", bytes(9), "a storage of 8 bytes has 9 bytes"),
        ("data.pkl", pickle.dumps(print), "builtins.print"),
        ("data.pkl", b"garbage", "not a valid pickle"),
    ],
)
def test_a_file_that_lies_is_refused(member: str, data: bytes, what: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=what) as caught:
        ckptkit.open(rewritten(tmp_path / "a.pt", member, data))
    assert str(tmp_path / "a.pt") in str(caught.value)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(200)}, tmp_path / "a.pt")
    path = rewritten(tmp_path / "a.pt", "version", b"3\n", method=zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="compressed or encrypted"):
        ckptkit.open(path)


def test_a_large_member_whose_size_is_cut_off_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        member = zipfile.ZipInfo("a/data.pkl")
        member.extra = b"\x01\x00\x18\x00"  # 24 bytes would follow
        archive.writestr(member, pickle.dumps({}))
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = data.rfind(b"PK\1\2") + 20
    data[at : at + 8] = b"\xff" * 8
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(FormatError, match="does not say its size"):
        ckptkit.open(tmp_path / "a.pt")


def test_a_tensor_outside_of_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        told = archive.read(name)
    # K\x02K\x03\x86 is the shape (2, 3), K\x03K\x01\x86 the strides (3, 1).
    for old, new in (
        (b"K\x02K\x03\x86", b"K\x03K\x03\x86"),
        (b"K\x03K\x01\x86", b"K\x04K\x01\x86"),
    ):
        assert told.count(old) == 1
        changed = rewritten(tmp_path / "a.pt", "data.pkl", told.replace(old, new))
        with pytest.raises(FormatError, match="reaches past its storage"):
            ckptkit.open(changed)


def test_a_part_without_elements_may_begin_behind_all(tmp_path: Path) -> None:
    nothing = torch.ones(4, 0).narrow(0, 2, 2)
    behind = torch.ones(2, 3, 2)[1:, :0].narrow(2, 1, 1)
    with opened({"w": torch.ones(2), "nothing": nothing, "behind": behind}, tmp_path) as found:
        assert found["model/nothing"][...].shape == (2, 0)
        assert found["model/behind"][...].shape == (1, 0, 1)


def test_a_tensor_expanded_to_many_times_its_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="expanded"):
        opened({"w": torch.ones(1).expand(1 << 40)}, tmp_path)


def test_a_conjugated_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="conjugated"):
        opened({"w": torch.tensor([1 + 2j]).conj()}, tmp_path)


def test_a_file_of_old_torch_is_named_as_one(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "old.pt").write_bytes(buffer.getvalue())
    with pytest.raises(FormatError, match=r"torch before 1\.6"):
        ckptkit.open(tmp_path)


def test_of_several_files_the_model_and_the_optimizer_count(tmp_path: Path) -> None:
    net, optimizer = trained(network())
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"custom": Custom()}, tmp_path / "training_args.bin")
    with ckptkit.open(tmp_path) as checkpoint:
        assert "optimizer/2.bias/exp_avg_sq" in checkpoint.arrays
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "mine.bin")
    with pytest.raises(FormatError, match="several files"):
        ckptkit.open(tmp_path)


def of_ranks(folder: Path, states: list[Any], what: str = "model") -> Path:
    for rank, state in enumerate(states):
        name = f"{what}_world_size_{len(states)}_rank_{rank}.pt"
        torch.save(state, folder / name)
    return folder


def test_plain_tensors_of_ranks_are_one_only_where_they_are_equal(tmp_path: Path) -> None:
    """Halves of a tensor that was cut by hand look like two copies of it."""
    with ckptkit.open(of_ranks(tmp_path, [{"w": torch.ones(3)} for _ in range(2)])) as found:
        assert found["model/w"].shape == (3,)
    of_ranks(tmp_path, [{"w": torch.ones(3) * rank} for rank in range(2)])
    with pytest.raises(FormatError, match="do not say how they belong together"):
        ckptkit.open(tmp_path)


def test_where_torch_computed_no_checksums_tensors_of_ranks_are_not_taken_for_equal(
    tmp_path: Path,
) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        of_ranks(tmp_path, [{"w": torch.ones(1 << 15), "step": torch.ones(1)} for _ in range(2)])
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    with pytest.raises(FormatError, match="w: the ranks' tensors differ"):
        ckptkit.open(tmp_path)


def test_what_each_rank_has_of_its_own_stays_so(tmp_path: Path) -> None:
    of_ranks(tmp_path, [{"w": torch.ones(3)} for _ in range(2)])
    states = [{"rng": {"cpu": torch.ones(3) * rank}, "seed": 1} for rank in range(2)]
    of_ranks(tmp_path, states, "extra_state")
    with ckptkit.open(tmp_path) as checkpoint:
        name = "other/extra_state/rng/cpu/rank.1"
        assert np.array_equal(checkpoint[name][...], np.ones(3))
        assert objects(checkpoint)["extra/extra_state"] == {"seed": 1}
    of_ranks(tmp_path, [{"scheduler": Custom()} for _ in range(2)], "extra_state")
    with ckptkit.open(tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w"}
        assert "Custom" in str(checkpoint.details["left_out"])


def test_numbers_and_arrays_of_numpy_are_plain_values(tmp_path: Path) -> None:
    rng: Any = np.random.RandomState(1).get_state()
    columns = np.asfortranarray(np.arange(6).reshape(2, 3))
    state = {"w": torch.ones(1), "rng": rng, "best": np.float64(0.5), "columns": columns}
    with opened(state, tmp_path) as checkpoint:
        found = objects(checkpoint)
        assert found["extra/best"] == 0.5
        assert np.array_equal(found["extra/columns"], columns)
        assert np.array_equal(found["extra/rng"][1], rng[1])
    with pytest.raises(FormatError, match="not of numbers"):
        opened({"w": torch.ones(1), "texts": np.array(["a"])}, tmp_path)


def test_an_optimizer_of_another_order_is_not_loaded_into(tmp_path: Path) -> None:
    """It only counts its parameters, whose shapes are alike: the model's order was assumed."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(list(net.parameters())[::2], lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {f"{n}.weight": net[n].weight for n in range(2)}
    opened({"model": state, "optimizer": optimizer.state_dict()}, tmp_path).close()
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    load(tmp_path, model=module, optimizer=torch.optim.SGD(module.parameters(), lr=1, momentum=0.9))
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.details["optimizer"] == "parameters by the order of the model"
    turned = torch.optim.SGD(list(module.parameters())[::-1], lr=1, momentum=0.9)
    with pytest.raises(ckptkit.CkptkitError, match="only counts its parameters"):
        load(tmp_path, model=module, optimizer=turned)


def test_a_count_that_only_fits_with_buffers_gives_no_names(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight, other], lr=0.1, momentum=0.9)
    (weight.sum() + other.sum()).backward()
    optimizer.step()
    for buffer in ({"norm.running_mean": torch.ones(2)}, {"counts": torch.ones(2).long()}):
        state = {"model": {"w": torch.ones(2), **buffer}, "optimizer": optimizer.state_dict()}
        with opened(state, tmp_path) as checkpoint:
            assert not [name for name in checkpoint.arrays if name.startswith("optimizer/")]
    # A causal mask is a buffer by its name, too; the bias of a layer that is called so is none.
    masks = {"h.attn.bias": torch.ones(1, 1, 2, 2), "g.attn.bias": torch.ones(2, 2).bool()}
    named = {"w": torch.ones(2), "attn.bias": torch.ones(2), **masks}
    with opened({"model": named, "optimizer": optimizer.state_dict()}, tmp_path) as checkpoint:
        assert "optimizer/attn.bias/momentum_buffer" in checkpoint.arrays
        roles = [checkpoint.info(f"model/{name}").role for name in ("attn.bias", *masks)]
        assert roles == ["param", "buffer", "buffer"]


def test_parts_of_tensors_in_files_with_numbers_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        torch.save({"w": torch.ones(2) * number}, tmp_path / f"consolidated.{number:02}.pth")
    with pytest.raises(FormatError, match=r"consolidated\.01\.pth"):
        ckptkit.open(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    with ckptkit.open(tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w"}


def test_two_models_of_the_same_ranks_are_refused(tmp_path: Path) -> None:
    for what in ("model", "teacher"):
        of_ranks(tmp_path, [{"w": torch.ones(3)} for _ in range(2)], what)
    with pytest.raises(FormatError, match="several files of rank 0"):
        ckptkit.open(tmp_path)


def test_a_model_counts_before_what_ranks_have_beside_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"cpu": torch.ones(2)}, tmp_path / "rng_state_rank_0.pt")
    with ckptkit.open(tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w"}
        assert checkpoint.details["left_out"].keys() == {"rng_state_rank_0.pt"}
    torch.save({"w": torch.zeros(2)}, tmp_path / "shard_rank_0.pt")
    with pytest.raises(FormatError, match="may be another one"):
        ckptkit.open(tmp_path)


def test_one_file_with_a_rank_in_its_name_is_one_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "lora_rank8.pt")
    with ckptkit.open(tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {"model/w"}


def test_files_that_say_how_many_they_are_have_to_be_all_there(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{n}-of-00003.bin" for n in (1, 2, 3)]
    for missing in names:
        for number, name in enumerate(names):
            torch.save({f"w{number}": torch.ones(2)}, tmp_path / name)
        torch.save({"state": {}}, tmp_path / "optimizer.pt")
        with ckptkit.open(tmp_path) as checkpoint:
            assert set(checkpoint.arrays) == {"model/w0", "model/w1", "model/w2"}
            assert checkpoint.details["left_out"].keys() == {"optimizer.pt"}
        (tmp_path / missing).unlink()
        with pytest.raises(FormatError, match=missing):
            ckptkit.open(tmp_path)


def test_what_an_optimizer_has_besides_is_kept(tmp_path: Path) -> None:
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(2)}, "shared": torch.ones(3)},
        "param_groups": [{"params": [0], "lr": 0.1}],
        "scale": torch.ones(1),
        "loss": 3,
    }
    with opened({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, tmp_path) as checkpoint:
        assert set(checkpoint.arrays) == {
            "model/w",
            "optimizer/w/exp_avg",
            "other/optimizer/scale",
            "other/optimizer/state/shared",
        }
        assert objects(checkpoint)["extra/optimizer"] == {"loss": 3}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": None, "param_groups": [{"params": [0]}]},
        {"state": None},
        {"state": {}, "param_groups": [{"params": [[0]]}]},
        {"state": {}, "param_groups": [{"params": [{}]}]},
        {"state": {}, "param_groups": [{"params": [0], "param_names": 5}]},
        {"state": {}, "param_groups": [{"params": [0], "param_names": [[]]}]},
        {"state": {}, "param_groups": 5},
        {"state": [1], "param_groups": [{}]},
        {"state": {(1, 2): {"a": 1}}, "param_groups": [{"params": [0]}]},
        {"state": {"w": torch.ones(2)}, "param_groups": []},
        [{"state": {}}, {"param_groups": [{}, 3]}],
    ],
)
def test_an_optimizer_of_any_shape_leaves_the_model_readable(
    optimizer: Any, tmp_path: Path
) -> None:
    state = {"model": {"w": torch.ones(2), "v": torch.ones(2)}, "optimizer": optimizer}
    with opened(state, tmp_path) as checkpoint:
        assert {"model/w", "model/v"} <= set(checkpoint.arrays)
        said = {*objects(checkpoint), *checkpoint.details.get("left_out", {})}
        more = "other/optimizer/state/w" in checkpoint.arrays
        assert more or any("optimizer" in name for name in said)


def test_a_tensor_under_a_key_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckptkit.CkptkitError, match="neither text nor number"):
        opened({"w": torch.ones(2), None: torch.ones(1)}, tmp_path)


def test_a_file_that_is_called_as_what_is_in_our_packs_is_still_of_torch(tmp_path: Path) -> None:
    for key, name in (("w", "a-zarr.json.pt"), ("zarr.json", "b.pt")):
        with opened({key: torch.ones(2)}, tmp_path, name) as checkpoint:
            assert len(checkpoint.arrays) == 1


def test_a_name_that_says_many_ranks_costs_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / f"model_world_size_{10**15}_rank_0.pt")
    with pytest.raises(FormatError, match="rank 1"):
        ckptkit.open(tmp_path)
