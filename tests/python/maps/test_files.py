"""Maps as files: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

import ikattn
from ikattn.maps import Batch, MapFileError, MapWriter, Recording, files, load_maps
from ikattn.maps.sequences import sequences
from ikattn.recorder import record
from programs import megabytes_grown
from recorded_models import recorded
from recordings import encoder_recording, random_maps, translation_recording
from tiny_texts import tiny_model, tiny_tokenizer

SUFFIXES = (".safetensors", ".npz", ".json")
every_format = pytest.mark.parametrize("suffix", SUFFIXES)


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def assert_same_tensor(found: object, expected: object) -> None:
    if expected is None:
        assert found is None
        return
    assert isinstance(found, Tensor)
    assert isinstance(expected, Tensor)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.nan_to_num(7.0), expected.detach().cpu().nan_to_num(7.0))


def assert_same(found: Recording, expected: Recording) -> None:
    for name in ("model", "maps", "layers", "names"):
        assert getattr(found, name) == getattr(expected, name)
    assert len(found.batches) == len(expected.batches)
    for batch, other in zip(found.batches, expected.batches, strict=True):
        assert batch.tokens == other.tokens
        assert batch.target_tokens == other.target_tokens
        assert list(batch) == list(other)
        for name in batch:
            for each in fields(ikattn.Contributions):
                mine, theirs = getattr(batch[name], each.name), getattr(other[name], each.name)
                if isinstance(theirs, dict):
                    assert mine.keys() == theirs.keys()
                    for key in theirs:
                        assert_same_tensor(mine[key], theirs[key])
                else:
                    assert_same_tensor(mine, theirs)


@every_format
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_recording_is_read_back_field_by_field(tmp_path, suffix, dtype):
    recording = encoder_recording(batches=2, dtype=dtype)
    recording.save(tmp_path / f"maps{suffix}")
    assert_same(load_maps(tmp_path / f"maps{suffix}"), recording)
    assert names_in(tmp_path) == [f"maps{suffix}"]


@every_format
@pytest.mark.parametrize("maps", [("summed",), ("value_norms",)])
def test_files_keep_tokens_and_ids(tmp_path: Path, suffix: str, maps: tuple[str, ...]) -> None:
    """Saved with a tokenizer, or named by one after loading: tokens are known without more."""
    pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
    model, tokenizer = tiny_model("BertModel"), tiny_tokenizer()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    recording = recorded(model, {"input_ids": ids, "attention_mask": (ids != 0).long()}, maps)
    names = [["w1", "w2", "w3", "w4"], ["w5", "w6"]]
    recording.save(tmp_path / f"named{suffix}", tokenizer)
    assert recording.batches[0].tokens is None
    assert load_maps(tmp_path / f"named{suffix}").batches[0].tokens == names
    recording.save(tmp_path / f"maps{suffix}")
    loaded = load_maps(tmp_path / f"maps{suffix}")
    assert loaded.batches[0].tokens is None
    for name in ("input_ids", "input_mask"):
        assert torch.equal(getattr(loaded.batches[0], name), getattr(recording.batches[0], name))
    loaded.save(tmp_path / f"again{suffix}", tokenizer)
    assert load_maps(tmp_path / f"again{suffix}").batches[0].tokens == names
    if maps == ("summed",):
        loaded.to_html(tmp_path / "page.html", tokenizer)
        load_maps(tmp_path / f"named{suffix}").to_html(tmp_path / "named.html")
        assert (tmp_path / "page.html").read_bytes() == (tmp_path / "named.html").read_bytes()


@every_format
def test_files_of_reduced_maps_and_of_a_decoder_s_steps_keep_tokens(tmp_path, suffix):
    pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
    model, tokenizer = tiny_model("GPT2LMHeadModel"), tiny_tokenizer()
    ids = torch.tensor([[5, 6, 7, 8]])
    reduced = recorded(model, ids, "summed", reduce="columns")
    reduced.save(tmp_path / f"reduced{suffix}", tokenizer)
    assert load_maps(tmp_path / f"reduced{suffix}").batches[0].tokens == [["w1", "w2", "w3", "w4"]]
    with torch.no_grad(), record(model, ("summed",)) as recording:
        made = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    recording.save(tmp_path / f"steps{suffix}", tokenizer)
    loaded = load_maps(tmp_path / f"steps{suffix}")
    words = tokenizer.convert_ids_to_tokens(made[0].tolist())
    assert [batch.tokens for batch in loaded.batches] == [[words[:n]] for n in (4, 5, 6)]
    joined = loaded.joined()
    assert [each.tokens for each in sequences(joined)] == [words[:6]]


def test_layers_are_found_by_name_and_number(tmp_path: Path) -> None:
    encoder_recording(layers=3).save(tmp_path / "maps.npz")
    for recording in (encoder_recording(layers=3), load_maps(tmp_path / "maps.npz")):
        assert list(recording) == recording.names
        for number, name in enumerate(recording):
            for found in (recording, recording.batches[0]):
                assert found[name] is found[number] is found[number - 3]
        with pytest.raises(KeyError, match=r"no layer 3 was recorded; .* numbers 0 to 2"):
            recording[3]
        assert 3 not in recording.batches[0]


@every_format
def test_mixed_types_odd_sizes_and_missing_maps_are_read_back(tmp_path: Path, suffix: str) -> None:
    recording = translation_recording()
    maps = recording.batches[0].layers
    maps["encoder"].summed = torch.rand(2, 3, 3, dtype=torch.bfloat16)[:, ::2].mT
    maps["encoder"].weights = torch.tensor([float("nan"), float("inf"), 1e-45, -0.0, 1 / 3])
    maps["decoder"] = ikattn.Contributions()  # ran, but nothing was asked of it
    maps["cross"].value_norms = torch.rand(0, 2, 5, dtype=torch.float64)
    maps["cross"].magnitude = torch.rand(2, 5, requires_grad=True)
    recording.save(tmp_path / f"maps{suffix}")
    found = load_maps(tmp_path / f"maps{suffix}")
    maps["encoder"].summed = maps["encoder"].summed.contiguous()
    assert_same(found, recording)
    assert not found["cross"].magnitude.requires_grad
    assert str(found["encoder"].weights.tolist()) == str(maps["encoder"].weights.tolist())


@every_format
def test_empty_recording_is_read_back(tmp_path: Path, suffix: str) -> None:
    recording = Recording("Model", ("summed",), {}, [Batch(tokens=[[]])])
    recording.save(tmp_path / f"maps{suffix}")
    assert_same(load_maps(tmp_path / f"maps{suffix}"), recording)


def test_files_open_with_their_own_libraries(tmp_path: Path) -> None:
    recording = encoder_recording()
    name = "0/encoder.layer.1.attention.self/summed"
    expected = recording["encoder.layer.1.attention.self"].summed
    recording.save(tmp_path / "maps.safetensors")
    recording.save(tmp_path / "maps.npz")
    with safetensors.safe_open(tmp_path / "maps.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor(name), expected)
        metadata = json.loads(file.metadata()["ikattn"])
    archive = np.load(tmp_path / "maps.npz")
    assert np.array_equal(archive[name], expected.numpy())
    of_archive = json.loads(archive["metadata.json"])
    del of_archive["widened"]
    assert of_archive == metadata
    assert metadata["ikattn_version"] == ikattn.__version__
    assert metadata["layers"][0]["block"] == "post"
    # Every map that exists is explained.
    assert set(metadata["definitions"]) == {each.name for each in fields(ikattn.Contributions)}


@every_format
def test_writer_takes_the_layers_of_a_running_model(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 3, 5, 16)
    with (
        MapWriter(tmp_path / f"maps{suffix}") as writer,
        record(model, on_layer=writer.write) as streamed,
    ):
        for batch in x:
            model(batch)
        writer.describe(streamed)
        writer.name_tokens(1, [list("abcde")] * 3)
    with record(model) as recording:
        for batch in x:
            model(batch)
    recording.batches[1].tokens = [list("abcde")] * 3
    assert_same(load_maps(tmp_path / f"maps{suffix}"), recording)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_writer_holds_one_layer_in_memory(tmp_path: Path, suffix: str) -> None:
    before = f"""
        from ikattn.maps import Layer, MapWriter
        maps = ikattn.Contributions(summed=torch.rand(8, 512, 512))  # 8 MB
        layer = Layer("layer", "self", "encoder", 1, "none", "torch")
        writer = MapWriter({str(tmp_path / f"maps{suffix}")!r})
        writer.__enter__().write(0, layer, maps)
    """
    then = """
        for batch in range(1, 24):
            writer.write(batch, layer, maps)
        writer.__exit__(None, None, None)
    """
    assert megabytes_grown(before, then) < 32  # the file has 190
    assert (tmp_path / f"maps{suffix}").stat().st_size > 190e6


def test_layer_written_twice_is_an_error(tmp_path: Path) -> None:
    layer = encoder_recording().layers["encoder.layer.0.attention.self"]
    writer = MapWriter(tmp_path / "maps.npz")
    with pytest.raises(RuntimeError, match="with MapWriter"):
        writer.write(0, layer, random_maps())
    recording = Recording("Model", (), {layer.name: layer}, [])
    with writer:
        writer.describe(recording)
        writer.write(0, layer, random_maps())
        with pytest.raises(ValueError, match=r"layer.0.* of batch 0 was written before"):
            writer.write(0, layer, random_maps())
    assert len(load_maps(tmp_path / "maps.npz").batches) == 1


# --- What goes wrong while a file is written


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be larger than 4 kB, as if the disk were full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


@every_format
@pytest.mark.usefixtures("small_files")
def test_full_disk_leaves_the_earlier_file_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"maps{suffix}"
    path.write_text("earlier")
    with pytest.raises(OSError, match=f"cannot write .*maps{suffix}: File too large"):
        encoder_recording().save(path)
    assert path.read_text() == "earlier"
    assert names_in(tmp_path) == [path.name]


@every_format
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"cannot write .*: it is a device, pipe or socket"):
        encoder_recording().save(path)
    assert path.is_fifo()
    assert names_in(tmp_path) == [path.name]


@every_format
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_writer_leaves_nothing(tmp_path, suffix, error):
    recording = encoder_recording()

    def interrupted() -> None:
        with MapWriter(tmp_path / f"maps{suffix}") as writer:
            for name, maps in recording.batches[0].items():
                writer.write(0, recording.layers[name], maps)
            assert not (tmp_path / f"maps{suffix}").exists()
            raise error

    with pytest.raises(error):
        interrupted()
    assert names_in(tmp_path) == []


@every_format
def test_error_of_another_file_keeps_its_own_name(tmp_path: Path, suffix: str) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"weights\.bin"),
        MapWriter(tmp_path / f"maps{suffix}"),
    ):
        (tmp_path / "weights.bin").read_bytes()


def test_unwritable_path_is_named_before_anything_runs(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"cannot write .*missing/maps\.npz"),
        MapWriter(tmp_path / "missing" / "maps.npz"),
    ):
        pytest.fail("the block must not be entered")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.npz"):
        encoder_recording().save(tmp_path / "folder.npz")


def test_unknown_ending_names_the_known_ones(tmp_path: Path) -> None:
    for act in (encoder_recording().save, load_maps):
        with pytest.raises(ValueError, match=r"\.safetensors, \.npz, \.json, got 'maps\.pt'"):
            act(tmp_path / "maps.pt")
    with pytest.raises(FileNotFoundError, match=r"maps\.npz"):
        load_maps(tmp_path / "maps.npz")


def test_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link.npz").symlink_to(tmp_path / "maps.npz")
    encoder_recording().save(tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert_same(load_maps(tmp_path / "maps.npz"), encoder_recording())


# --- What is no file of maps


@every_format
def test_file_cut_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"maps{suffix}"
    encoder_recording().save(path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:size])
        with pytest.raises(MapFileError, match=f"maps{suffix}: ") as caught:
            load_maps(path)
        assert "cut short" in str(caught.value)


def test_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "maps.npz"
    encoder_recording().save(path)
    damaged = bytearray(path.read_bytes())
    damaged[300] ^= 1  # a number of the first map
    path.write_bytes(damaged)
    with pytest.raises(MapFileError, match="damaged"):
        load_maps(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    np.savez(tmp_path / "arrays.npz", np.ones(2))
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text('{"metadata": {"format": "other"}, "arrays": {}}')
    for path in tmp_path.iterdir():
        with pytest.raises(MapFileError, match="no file of maps that ikattn wrote"):
            load_maps(path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def test_pickled_array_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    encoder_recording().save("maps.npz")
    np.save("bomb.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile("maps.npz", "a") as archive:
        archive.write("bomb.npy", "0/encoder.layer.0.attention.self/other.npy")
    with pytest.raises(MapFileError, match="pickle"):
        load_maps("maps.npz")
    assert not Path("exploded").exists()
    pickle.loads(Path("bomb.npy").read_bytes()[128:])  # it would have
    assert Path("exploded").exists()


@every_format
def test_later_format_says_to_upgrade(tmp_path, suffix, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(files, "VERSION", 99)
        encoder_recording().save(tmp_path / f"maps{suffix}")
    with pytest.raises(MapFileError, match=r"version 99 of the format.*upgrade"):
        load_maps(tmp_path / f"maps{suffix}")


@pytest.mark.parametrize(
    ("library", "suffix"), [("safetensors", ".safetensors"), ("numpy", ".npz")]
)
def test_missing_library_is_named_with_its_command(tmp_path, library, suffix, monkeypatch):
    encoder_recording().save(tmp_path / f"maps{suffix}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs {library}: pip install {library}"):
        load_maps(tmp_path / f"maps{suffix}")
