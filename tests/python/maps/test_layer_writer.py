"""Maps written a file a layer beside the model: whole files, full disks, interruptions."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ikattn
from ikattn.maps import LayerWriter, Recording, TopK, files
from ikattn.recorder import record
from recorded_models import encoder
from recordings import encoder_recording

pytestmark = pytest.mark.usefixtures("float64_by_default")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_written(
    folder: Path, model: Any, *inputs: Any, waiting: int = 2, **options: Any
) -> LayerWriter:
    """Runs the model, whose maps a writer takes."""
    with (
        torch.no_grad(),
        LayerWriter(folder, waiting=waiting) as writer,
        record(model, on_layer=writer.write, **options),
    ):
        for x in inputs:
            model(x)
    return writer


def write(recording: Recording, folder: Path, *, vanishes: bool = False) -> None:
    with LayerWriter(folder) as writer:
        if vanishes:
            shutil.rmtree(folder)
        for name, maps in recording.batches[0].items():
            writer.write(0, recording.layers[name], maps)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at the second file, and had room for it later."""
    begun: list[Any] = []

    def save(recording: Any, path: Path) -> None:
        begun.append(path)
        if len(begun) == 2:
            raise OSError(28, f"cannot write {path}: No space left on device")
        own(recording, path)

    own = files.save
    monkeypatch.setattr(files, "save", save)


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_each_layer_of_each_call_is_a_file_that_loads(tmp_path: Path, suffix: str) -> None:
    model = encoder()
    inputs = [torch.randn(1, 3, 16), torch.randn(2, 5, 16)]
    with torch.no_grad(), record(model, None) as kept:
        for x in inputs:
            model(x)
    with (
        torch.no_grad(),
        LayerWriter(tmp_path / "new" / "folder", suffix=suffix) as writer,
        record(model, None, on_layer=writer.write),
    ):
        for x in inputs:
            model(x)
    expected = [f"00000{b}-00{n}-layers.{n}.self_attn{suffix}" for b in (0, 1) for n in (0, 1)]
    assert names_in(writer.folder) == expected == [path.name for path in writer.written]
    for path, (b, name) in zip(
        writer.written, [(b, name) for b in (0, 1) for name in kept.names], strict=True
    ):
        loaded = ikattn.load_maps(path)
        assert (loaded.model, loaded.maps) == ("TransformerEncoder", kept.maps)
        assert loaded.names == [name]
        assert torch.equal(loaded[name].encoder, kept.batches[b][name].encoder)


def test_reduced_maps_are_written_too(tmp_path: Path) -> None:
    x = torch.randn(1, 5, 16)
    writer = run_written(tmp_path, encoder(), x, reduce=TopK(2), queries=[4, 0])
    maps = ikattn.load_maps(writer.written[0])["layers.0.self_attn"]
    assert maps.reduced["summed"].sources.shape == (1, 2, 2)
    assert maps.rows.tolist() == [4, 0]


def test_the_model_goes_on_while_the_disk_is_slow(tmp_path, monkeypatch):
    may_write, own = threading.Event(), files.save

    def slow(recording: Any, path: Path) -> None:
        assert may_write.wait(60)
        own(recording, path)

    monkeypatch.setattr(files, "save", slow)
    model = encoder()
    with torch.no_grad(), LayerWriter(tmp_path) as writer, record(model, on_layer=writer.write):
        model(torch.randn(1, 3, 16))  # two layers: one is being written, one waits
        assert names_in(tmp_path) == []
        may_write.set()
        model(torch.randn(1, 3, 16))
    assert len(writer.written) == 4


@pytest.mark.usefixtures("full_disk")
def test_full_disk_keeps_what_is_complete_and_says_where(tmp_path: Path) -> None:
    inputs = [torch.randn(1, 3, 16)] * 9
    with pytest.raises(OSError, match=r"LayerWriter: .*000.*No space left on device") as caught:
        run_written(tmp_path, encoder(), *inputs, waiting=1)
    assert caught.value.errno == 28
    first, second = (f"000000-00{n}-layers.{n}.self_attn.safetensors" for n in (0, 1))
    assert str(tmp_path / second) in str(caught.value)
    assert f"1 files are complete in {tmp_path}, the last {first}" in str(caught.value)
    assert names_in(tmp_path) == [first]  # nor what came after it
    assert ikattn.load_maps(tmp_path / first).names == ["layers.0.self_attn"]


@pytest.mark.usefixtures("full_disk")
def test_full_disk_is_told_at_the_end_at_the_latest(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write(encoder_recording(layers=2), tmp_path)


def test_folder_that_vanishes_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write .*gone.*; 0 files are complete"):
        write(encoder_recording(layers=1), tmp_path / "gone", vanishes=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interruption_leaves_whole_files_alone(tmp_path: Path, error: type[BaseException]) -> None:
    model = encoder()

    def fail(*_: Any) -> None:
        raise error

    model.layers[1].linear1.register_forward_hook(fail)
    with pytest.raises(error):
        run_written(tmp_path, model, torch.randn(1, 3, 16))
    assert [ikattn.load_maps(tmp_path / name).names for name in names_in(tmp_path)] == [
        ["layers.0.self_attn"],
        ["layers.1.self_attn"],
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "ikattn-layers"]


def test_what_the_writer_cannot_do_it_says(tmp_path: Path) -> None:
    recording = encoder_recording(layers=1)
    ((name, maps),) = recording.batches[0].items()
    writer = LayerWriter(tmp_path)
    with pytest.raises(RuntimeError, match="as `with LayerWriter"):
        writer.write(0, recording.layers[name], maps)
    with pytest.raises(ValueError, match=r"suffix must be one of \.safetensors.* got '\.pt'"):
        LayerWriter(tmp_path, suffix=".pt")
    with pytest.raises(ValueError, match="waiting must be 1 or more, got 0"):
        LayerWriter(tmp_path, waiting=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), LayerWriter(tmp_path / "file"):
        pass


def test_a_mask_that_is_used_again_changes_no_file(tmp_path, monkeypatch):
    save, may_write = files.save, threading.Event()

    def wait_and_save(*arguments: Any) -> None:
        may_write.wait()
        save(*arguments)

    monkeypatch.setattr(files, "save", wait_and_save)
    model, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    padding = torch.zeros(1, 5, dtype=torch.bool)
    with LayerWriter(tmp_path) as writer:
        with torch.no_grad(), record(model, on_layer=writer.write):
            for count in (4, 2):
                padding.zero_()
                padding[0, count:] = True
                model(x, x, x, key_padding_mask=padding)
        may_write.set()
    for path, count in zip(writer.written, (4, 2), strict=True):
        maps = next(iter(ikattn.load_maps(path).batches[0].values()))
        assert maps.key_padding.tolist() == [[i >= count for i in range(5)]]
