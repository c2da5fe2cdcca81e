"""Every kind of damage is named, with the samples it touches; a sound cache has none."""

import json
import shutil

import numpy as np
import pytest
from cache_fixtures import begin_cache, make_cache, shard_arrays

from cache.read import open_cache
from cache.verify import verify
from pipeline.cli import main
from schemas.errors import CacheError
from schemas.say import Silent


@pytest.fixture(scope="module", params=["f32", "bf16"])
def sound(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "hs.zarr"
    make_cache(path, request.param)
    return path


def damaged(sound, tmp_path, harm):
    path = tmp_path / "hs.zarr"
    shutil.copytree(sound, path)
    harm(path)
    return str(path)


def flip(path, where=5):
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_cache_has_no_faults(sound, deep):
    assert verify(str(sound), deep, Silent())[1] == []


@pytest.mark.parametrize(
    ("harm", "where", "what", "touched"),
    [
        (lambda p: (p / "hidden/2/c/1/0").unlink(), "hidden/2/c/1/0", "missing", 4),
        (lambda p: (p / "hidden/3/c/0/0").write_bytes(b"short"), "hidden/3/c/0/0", "5 bytes", 4),
        (lambda p: (p / "shards/000002.json").unlink(), "shards/000002.json", "missing", 4),
        (lambda p: (p / "shards/000002.json").write_text("{"), "shards/000002.json", "not JSON", 4),
        (lambda p: (p / "index.parquet").write_bytes(b"PAR1"), "index.parquet", "cannot be read", 0),
    ],
)
def test_a_quick_look_finds_what_is_missing_or_short(sound, tmp_path, harm, where, what, touched):
    (fault,) = verify(damaged(sound, tmp_path, harm), False, Silent())[1]
    assert (fault.where, len(fault.samples)) == (where, touched)
    assert what in fault.what


@pytest.mark.parametrize("name", ["hidden/2/c/1/0", "logits/topk_ids/c/1/0", "tokens/input_ids/c/1"])
def test_a_flipped_bit_is_found_by_reading_deep_alone(sound, tmp_path, name):
    path = damaged(sound, tmp_path, lambda p: flip(p / name))
    assert verify(path, False, Silent())[1] == []
    (fault,) = verify(path, True, Silent())[1]
    assert fault.where == name
    assert "checksum" in fault.what
    assert len(fault.samples) == 4


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda a, start: a["tokens/input_ids"].__setitem__(start, a["tokens/input_ids"][start] + 1),
            "differ from the index's hash",
        ),
        (lambda a, start: a["hidden/2"].__setitem__(start + 2, np.nan), "not finite"),
        (lambda a, start: a["hidden/2"].__setitem__(slice(start, start + 16), 0), "all states are zero"),
        (lambda a, start: a["logits/topk_logprobs"].__setitem__(start + 3, np.nan), "log-probability is not finite"),
    ],
)
def test_wrong_content_under_right_checksums_is_found(tmp_path, change, what):
    """What a defect of a writer would leave: the checksums are those of the wrong bytes."""
    make_cache(tmp_path / "good")
    writer = begin_cache(tmp_path / "hs.zarr")
    row = writer.plan.shard(1).to_pylist()[0]
    for shard in range(3):
        arrays = shard_arrays(writer, shard)
        if shard == 1:
            change(arrays, row["offset"] - 64)
        writer.commit_shard(shard, arrays)
    for key in ("target/head.safetensors", "target/config.json"):
        writer.put_file(key, (tmp_path / "good" / key).read_bytes())
    writer.finish()
    assert verify(str(tmp_path / "hs.zarr"), False, Silent())[1] == []
    faults = verify(str(tmp_path / "hs.zarr"), True, Silent())[1]
    assert {fault.samples for fault in faults} == {(row["sample_id"],)}
    assert any(what in fault.what for fault in faults)


def test_what_is_no_complete_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match="no hidden-state cache"):
        verify(str(tmp_path), False, Silent())
    begin_cache(tmp_path / "hs.zarr")
    with pytest.raises(CacheError, match="incomplete"):
        verify(str(tmp_path / "hs.zarr"), False, Silent())


def test_the_command_exits_1_and_names_the_samples(sound, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(sound), "--deep"])
    assert caught.value.code == 0
    assert "sound (3 shards, 12 samples" in capsys.readouterr().out
    path = damaged(sound, tmp_path, lambda p: (p / "hidden/2/c/1/0").unlink())
    with pytest.raises(SystemExit) as caught:
        main(["verify", path, "--json", str(tmp_path / "faults.json")])
    assert caught.value.code == 1
    out, err = capsys.readouterr()
    assert "hidden/2/c/1/0: missing (samples " in out
    assert "1 faults, 4 of 12 samples touched" in out
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert json.loads((tmp_path / "faults.json").read_text())["faults"][0]["where"] == "hidden/2/c/1/0"


def test_repair_forgets_the_damaged_shard_alone(sound, tmp_path, capsys):
    path = damaged(sound, tmp_path, lambda p: flip(p / "hidden/2/c/1/0"))
    with pytest.raises(SystemExit) as caught:
        main(["verify", path, "--deep", "--repair"])
    assert caught.value.code == 1
    assert "1 shards forgotten" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "hs.zarr" / "shards").iterdir()) == ["000000.json", "000002.json"]
    with pytest.raises(CacheError, match=r"incomplete \(2 of 3 shards\)"):
        open_cache(path)
