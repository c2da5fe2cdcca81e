"""Converting gives what capturing in that codec would have given; killed anywhere it ends with the same bytes."""

import numpy as np
import pytest
import torch
from cache_fixtures import make_cache
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, write_jsonl

from cache.convert import convert
from cache.read import open_cache
from cache.store import LocalStore
from cache.verify import verify
from cache.write import CacheWriter
from capture.run import capture
from pipeline.cli import main
from schemas.errors import CacheDamaged, CacheError, OptionError
from schemas.say import Silent

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The same capture of a bfloat16 target in several codecs."""
    folder = tmp_path_factory.mktemp("convert")
    target = random_target(folder / "tiny", dtype=torch.bfloat16)
    data = write_jsonl(folder / "rows.jsonl", shipped_rows(24))
    for codec in ("f32", "bf16", "fp8", "int8", "int4"):
        options = {"layers": (0, 1, 3), "dtype": "bfloat16", "codec": codec}
        capture(capture_options(target, data, folder / codec, **options), Silent())
    return folder


def objects(path, names=("tokens", "hidden", "logits", "target")):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.relative_to(path).parts[0].startswith(names)
    }


@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "int4"])
def test_converting_is_capturing_in_that_codec(captured, tmp_path, source, codec):
    made = convert(str(captured / source), str(tmp_path / "out"), codec, None, CPU, Silent())
    expected = open_cache(str(captured / codec))
    assert objects(tmp_path / "out") == objects(captured / codec)
    assert made.identity == expected.manifest.identity and made.totals == expected.manifest.totals
    assert open_cache(str(tmp_path / "out")).index.equals(expected.index)
    assert verify(str(tmp_path / "out"), True, Silent())[1] == []
    assert made.record["converted"] == f"from {source}"


def test_fewer_layers_are_the_same_objects_and_the_same_channels(captured, tmp_path):
    convert(str(captured / "int4"), str(tmp_path / "out"), None, [0, 3], CPU, Silent())
    whole = objects(captured / "int4")
    assert objects(tmp_path / "out") == {name: data for name, data in whole.items() if name.split("/")[1] != "1"}
    cache = open_cache(str(tmp_path / "out"))
    assert cache.layers == (0, 3)
    assert cache.codec.channels == {n: open_cache(str(captured / "int4")).codec.channels[n] for n in (0, 3)}


def test_the_compressed_codec_goes_and_comes_back_bit_for_bit(captured, tmp_path):
    convert(str(captured / "bf16"), str(tmp_path / "zstd"), "bf16-zstd", None, CPU, Silent())
    convert(str(tmp_path / "zstd"), str(tmp_path / "back"), "bf16", None, CPU, Silent())
    assert objects(tmp_path / "back") == objects(captured / "bf16")
    assert verify(str(tmp_path / "zstd"), True, Silent())[1] == []


@pytest.mark.parametrize("stop", range(4))
def test_stopped_anywhere_it_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch, stop):
    make_cache(tmp_path / "in", "bf16")
    convert(str(tmp_path / "in"), str(tmp_path / "once"), "int8", None, CPU, Silent())
    done, commit = [], CacheWriter.commit_shard

    def until(writer, shard, arrays):
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(shard)
        return commit(writer, shard, arrays)

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        killed.setattr(CacheWriter, "commit_shard", until)
        if stop == 3:
            killed.setattr(CacheWriter, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(str(tmp_path / "in"), str(tmp_path / "often"), "int8", None, CPU, Silent())
    with pytest.raises(CacheError, match=r"incomplete.*dflash convert"):
        open_cache(str(tmp_path / "often"))
    monkeypatch.setattr(CacheWriter, "commit_shard", lambda *a: done.append(a[1]) or commit(*a))
    convert(str(tmp_path / "in"), str(tmp_path / "often"), "int8", None, CPU, Silent())
    assert sorted(done) == [0, 1, 2]
    every = ("tokens", "hidden", "logits", "target", "shards", "index", "zarr")
    assert objects(tmp_path / "once", every) == objects(tmp_path / "often", every)
    assert sorted(p.name for p in (tmp_path / "once").iterdir()) == sorted(
        p.name for p in (tmp_path / "often").iterdir()
    )


def test_a_damaged_shard_is_converted_again_and_a_sound_cache_left_alone(tmp_path):
    make_cache(tmp_path / "in", "bf16")
    say = Recorder()
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "fp8", None, CPU, say)
    before = objects(tmp_path / "out")
    (tmp_path / "out/hidden/2/c/1/0").unlink()
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "fp8", None, CPU, say)
    assert objects(tmp_path / "out") == before and "damaged" in say.warnings[0]
    convert(str(tmp_path / "in"), str(tmp_path / "out"), "fp8", None, CPU, say)
    assert "nothing to do" in say.notes[-1]


@pytest.mark.parametrize(
    ("held", "codec", "layers", "error", "rule"),
    [
        ("bf16", "f32", None, OptionError, "does not come back: choose among bf16, bf16-zstd, int8, fp8, int4"),
        ("int4", "bf16", None, OptionError, "choose among int4"),
        ("fp8", "int8", None, OptionError, "choose among fp8, int4"),
        ("bf16", None, [0, 1], CacheError, "layer 1 is not in"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, held, codec, layers, error, rule):
    make_cache(tmp_path / "in", held)
    with pytest.raises(error, match=rule):
        convert(str(tmp_path / "in"), str(tmp_path / "out"), codec, layers, CPU, Silent())
    assert not (tmp_path / "out").exists()


def test_another_cache_in_the_place_is_refused(tmp_path):
    make_cache(tmp_path / "in", "bf16")
    make_cache(tmp_path / "other", "bf16", shards=2)
    for out, rule in (("other", "holds another cache"), ("in", "to be converted")):
        with pytest.raises((CacheError, OptionError), match=rule):
            convert(str(tmp_path / "in"), str(tmp_path / out), "int8", None, CPU, Silent())


def test_damage_of_the_source_is_named_and_nothing_is_finished(tmp_path):
    make_cache(tmp_path / "in", "bf16")
    victim = tmp_path / "in/hidden/2/c/1/0"
    data = bytearray(victim.read_bytes())
    data[3] ^= 4
    victim.write_bytes(bytes(data))
    with pytest.raises(CacheDamaged, match=r"hidden/2, shard 1: .*checksum \(samples "):
        convert(str(tmp_path / "in"), str(tmp_path / "out"), "fp8", None, CPU, Silent())
    assert not CacheWriter.resume(str(tmp_path / "out")).manifest.complete


def test_a_capture_keeps_off_what_is_converted(captured, tmp_path):
    convert(str(captured / "bf16"), str(tmp_path / "out"), "int8", None, CPU, Silent())
    options = capture_options(
        str(captured / "tiny"),
        str(captured / "rows.jsonl"),
        tmp_path / "out",
        layers=(0, 1, 3),
        dtype="bfloat16",
        codec="int8",
    )
    say = Recorder()
    assert capture(options, say).complete and "nothing to do" in say.notes[-1]
    LocalStore(tmp_path / "out").delete("hidden/1/c/0/0")
    with pytest.raises(CacheError, match=r"dflash convert"):
        capture(options, Silent())


def test_the_command(tmp_path, capsys):
    make_cache(tmp_path / "in", "bf16")
    words = ["convert", str(tmp_path / "in"), str(tmp_path / "out")]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--codec", "int4", "--layers", "0,3"])
    assert caught.value.code == 0 and "layers 0, 3, 3 shards, complete" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([*words, "--codec", "int3"])
    assert caught.value.code == 2 and "int3: no such codec" in capsys.readouterr().err
    stored = open_cache(str(tmp_path / "out"))
    assert np.isfinite(stored.hidden(0, 64, (0, 3)).float().numpy()).all()
