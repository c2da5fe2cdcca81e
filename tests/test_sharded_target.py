"""A target sharded over several processes (`--tp`): the same states as of one, and what cannot be sharded."""

from pathlib import Path

import pytest
import torch
from capture_fixtures import contents, random_target, shipped_rows, write_jsonl
from crew_fixtures import ROWS, options_for

from cache.read import open_cache
from schemas.errors import OptionError, TargetError
from target.load import resolve_target
from target.parallel import check_parallel


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def target(folder) -> str:
    return random_target(folder / "tiny", num_key_value_heads=2)


@pytest.fixture(scope="module")
def data(folder) -> str:
    return write_jsonl(folder / "rows.jsonl", shipped_rows(ROWS))


@pytest.fixture(scope="module")
def alone(crew_driver, folder, target, data) -> None:
    """The cache of one process."""
    codes, _ = crew_driver.run(1, options_for(target, data, folder / "alone"))
    assert codes == [0]


def assert_same_to_rounding(whole, parts) -> None:
    """The hidden states and the top-k of two caches of one plan."""
    rows = whole.manifest.totals.shards * whole.manifest.identity.shard_tokens
    torch.testing.assert_close(parts.hidden(0, rows, (0, 2)), whole.hidden(0, rows, (0, 2)), atol=2e-5, rtol=1e-5)
    (ids, logprobs, rest), (part_ids, part_logprobs, part_rest) = whole.topk(0, rows), parts.topk(0, rows)
    assert (ids != part_ids).float().mean() < 1e-3, "only ties change places"
    torch.testing.assert_close(part_logprobs, logprobs, atol=8e-3, rtol=0)  # one unit of float16
    torch.testing.assert_close(part_rest, rest, atol=1e-4, rtol=0)


def test_a_sharded_target_gives_the_same_states(crew_driver, folder, target, data, alone):
    """tp=2, once as one copy of the target over two processes, once as two copies over four: equal to each other in bytes, to one process to rounding."""
    for world, out in ((2, folder / "tp"), (4, folder / "tp-twice")):
        assert crew_driver.run(world, options_for(target, data, out, tp=2))[0] == [0] * world
    assert contents(folder / "tp") == contents(folder / "tp-twice")
    whole, parts = open_cache(str(folder / "alone")), open_cache(str(folder / "tp"))
    assert parts.manifest.identity.tp == 2
    assert_same_to_rounding(whole, parts)
    key = "target/head.safetensors"
    assert contents(folder / "tp")[key] == contents(folder / "alone")[key]


def test_a_sharded_target_takes_long_samples_in_pieces(crew_driver, folder, target, data, alone):
    out = folder / "tp-pieces"
    assert crew_driver.run(2, options_for(target, data, out, tp=2, prefill_chunk=16))[0] == [0, 0]
    assert_same_to_rounding(open_cache(str(folder / "alone")), open_cache(str(out)))


def test_a_sharded_target_calibrates_together_and_all_processes_use_what_it_found(crew_driver, folder, target, data):
    for world, out in ((2, folder / "tp-int8"), (4, folder / "tp-int8-twice")):
        assert crew_driver.run(world, options_for(target, data, out, tp=2, codec="int8"))[0] == [0] * world
    assert contents(folder / "tp-int8") == contents(folder / "tp-int8-twice")
    channels = open_cache(str(folder / "tp-int8")).codec.channels
    assert set(channels) == {0, 2} and all(len(own) == 8 for own in channels.values())


@pytest.mark.parametrize("layers", [{"tie_word_embeddings": False}, {"num_key_value_heads": 1}])
def test_untied_heads_and_single_key_heads(crew_driver, folder, data, layers):
    target = random_target(folder / f"kind-{next(iter(layers))}", **{"num_key_value_heads": 2, **layers})
    out = folder / f"cache-{next(iter(layers))}"
    codes, _ = crew_driver.run(2, options_for(target, data, out, tp=2))
    if layers.get("num_key_value_heads") == 1:
        assert sorted(codes) == [1, 2], "one process refuses, the other stands by"
        assert not out.exists()
        return
    assert codes == [0, 0]
    assert crew_driver.run(1, options_for(target, data, folder / "untied-alone"))[0] == [0]
    key = "target/head.safetensors"
    assert contents(out)[key] == contents(folder / "untied-alone")[key]


def test_a_target_that_cannot_be_shared_is_refused(target):
    from target.load import read_config

    config = read_config(resolve_target(target)).get_text_config()
    cpu = torch.device("cpu")
    check_parallel(config, 2, cpu)
    with pytest.raises(
        OptionError, match=r"--tp 3 does not divide the target's 2 attention heads: give one that does \(1, 2\)"
    ):
        check_parallel(config, 3, cpu)
    config.vocab_size = 2047
    with pytest.raises(OptionError, match=r"2047 vocabulary rows.*\(1\)"):
        check_parallel(config, 2, cpu)
    config.vocab_size = 2048
    config.base_model_tp_plan = None
    with pytest.raises(TargetError, match="no tensor-parallel plan"):
        check_parallel(config, 2, cpu)
