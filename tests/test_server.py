"""`regenerate --server`: the same file as in process, whatever the server can do, and what happens where it fails."""

import json

import pytest
from capture_fixtures import ROOT, Recorder, capture_options, write_jsonl
from server_fixtures import Behaviour, serving

from capture import server as module
from capture.generate import Sampling
from capture.journal import partial_path
from capture.regenerate import regenerate
from capture.run import dry_run
from capture.workers import side_by_side
from schemas.errors import DataError, OptionError, ServerFault
from schemas.options import RegenerateOptions
from target.chat import encode_texts, open_chat, prompt_ids
from target.load import load_target, resolve_target

PROMPTS = ROOT / "demo" / "prompts.jsonl"
ROWS = 8


@pytest.fixture(scope="module")
def target(tiny_chat):
    return load_target(resolve_target(tiny_chat), "float32", "cpu")


@pytest.fixture(scope="module")
def chat(tiny_chat):
    return open_chat(resolve_target(tiny_chat))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    waits = []
    open_server = module.open_server
    monkeypatch.setattr(module, "open_server", lambda *args: open_server(*args, wait=waits.append))
    return waits


def options(tiny_chat, out, url=None, prompts=PROMPTS, **changes):
    small = {
        "max_new_tokens": 24,
        "dtype": "float32",
        "device": "cpu",
        "limit": ROWS,
        "concurrency": 4,
        "timeout": 30.0,
    }
    return RegenerateOptions(target=tiny_chat, prompts=str(prompts), out=str(out), server=url, **{**small, **changes})


@pytest.fixture(scope="module")
def in_process(tiny_chat, tmp_path_factory):
    out = tmp_path_factory.mktemp("in-process") / "answers.jsonl"
    regenerate(options(tiny_chat, out), Recorder())
    return out


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", ["", "/v1/"])
def test_a_server_that_returns_ids_gives_the_file_of_the_process(path, tiny_chat, target, chat, in_process, tmp_path):
    behaviour, say = Behaviour(), Recorder()
    with serving(target, chat, behaviour) as url:
        summary = regenerate(options(tiny_chat, tmp_path / "a.jsonl", url + path), say)
    assert (tmp_path / "a.jsonl").read_bytes() == in_process.read_bytes()
    assert (summary.prompts, summary.answers) == (ROWS, ROWS)
    assert {body["model"] for body in behaviour.seen} == {"tiny-served"}
    assert behaviour.busiest > 1, "requests run side by side"
    assert not say.warnings
    assert any("by completions of token ids" in note for note in say.notes)
    assert say.steps[-1] == ("regenerate", ROWS, ROWS)


@pytest.mark.parametrize(
    "behaviour",
    [{"returns_ids": False}, {"refuses_extras": True}, {"completions": False}],
    ids=["text alone", "no extras", "chat alone"],
)
def test_other_servers_answers_are_tokenised_and_say_so(behaviour, tiny_chat, target, chat, in_process, tmp_path):
    say, out = Recorder(), tmp_path / "a.jsonl"
    with serving(target, chat, Behaviour(**behaviour)) as url:
        regenerate(options(tiny_chat, out, url), say)
    for row, ours in zip(rows_of(out), rows_of(in_process), strict=True):
        assert row["retokenised"] is True
        assert {key: row[key] for key in ("messages", "finished", "target")} == {
            key: ours[key] for key in ("messages", "finished", "target")
        }
        given = prompt_ids(chat, row["messages"][:-1])
        text = row["messages"][-1]["content"] + ("<|im_end|>" if row["finished"] else "")
        assert row["input_ids"] == given + encode_texts(chat.tokenizer, [text])[0]
        assert row["loss_mask"] == [0] * len(given) + [1] * (len(row["input_ids"]) - len(given))
    assert any(f"no ids with {ROWS} answers" in warning for warning in say.warnings)
    assert {row["finished"] for row in rows_of(out)} == {True, False}
    plan = dry_run(capture_options(tiny_chat, str(out), tmp_path / "hs"), Recorder())
    assert plan.manifest.sources[0].kept == ROWS


def test_several_turns_and_conversations_answered_anew(tiny_chat, target, chat, tmp_path):
    rows = [
        {"turns": ["What is the capital of Japan?", "And of France?"]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "what another said"}]},
    ]
    prompts = write_jsonl(tmp_path / "p.jsonl", rows)
    files = []
    for name, behaviour in (("process", None), ("ids", Behaviour()), ("chat", Behaviour(completions=False))):
        out = tmp_path / f"{name}.jsonl"
        if behaviour is None:
            regenerate(options(tiny_chat, out, prompts=prompts), Recorder())
        else:
            with serving(target, chat, behaviour) as url:
                regenerate(options(tiny_chat, out, url, prompts=prompts), Recorder())
        files.append(rows_of(out))
    assert files[0] == files[1]
    assert [row["messages"] for row in files[2]] == [row["messages"] for row in files[0]]
    assert "what another said" not in json.dumps(files[0])
    assert regenerate(options(tiny_chat, tmp_path / "chat.jsonl", prompts=prompts), Recorder()) is None


def test_failures_that_pass_are_waited_for(tiny_chat, target, chat, in_process, tmp_path, no_waiting):
    behaviour = Behaviour(codes=[503, 429, 0, 500])
    with serving(target, chat, behaviour) as url:
        regenerate(options(tiny_chat, tmp_path / "a.jsonl", url, concurrency=1), Recorder())
    assert (tmp_path / "a.jsonl").read_bytes() == in_process.read_bytes()
    assert no_waiting == [0.5, 7.0, 2.0, 4.0], "twice as long each time, or as long as the server says"


def test_a_server_that_dies_loses_nothing(tiny_chat, target, chat, in_process, tmp_path):
    out = tmp_path / "a.jsonl"
    behaviour = Behaviour(dies_after=4)
    with serving(target, chat, behaviour) as url:
        with pytest.raises(ServerFault, match=r"HTTP 500.*after 2 tries.*what is answered is kept") as caught:
            regenerate(options(tiny_chat, out, url, retries=1, concurrency=1), Recorder())
        assert caught.value.exit_code == 1
        assert "\n" not in str(caught.value)
        assert len(partial_path(out).read_text().splitlines()) == 1 + 3, "the settings and 3 answers, the probe aside"
        with partial_path(out).open("ab") as file:
            file.write(b'{"turn":0,"rows":[1],"ans')
        behaviour.dies_after = None
        behaviour.seen.clear()
        say = Recorder()
        regenerate(options(tiny_chat, out, url), say)
    assert "going on, 3 answers are there" in say.notes[0]
    assert len(behaviour.seen) == 1 + ROWS - 3
    assert out.read_bytes() == in_process.read_bytes()
    assert not partial_path(out).exists()


def test_a_server_that_hangs_or_is_not_there(tiny_chat, target, chat, tmp_path):
    out = tmp_path / "a.jsonl"
    with (
        serving(target, chat, Behaviour(codes=[-1, -1])) as url,
        pytest.raises(ServerFault, match=r"timed out.* after 2 tries"),
    ):
        regenerate(options(tiny_chat, out, url, retries=1, timeout=0.1), Recorder())
    with pytest.raises(ServerFault, match="does not answer"):
        regenerate(options(tiny_chat, out, url, retries=0), Recorder())
    for wrong in ("localhost:8000", "ftp://x/y", "http://"):
        with pytest.raises(OptionError, match="write a URL such as"):
            regenerate(options(tiny_chat, out, wrong), Recorder())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reply", "rule"),
    [
        (b"<html>", "does not answer in JSON"),
        (b"[]", "does not answer in JSON"),
        ({"choices": []}, "without choices"),
        ({"choices": [{"finish_reason": "stop"}]}, "without a text"),
        ({"choices": [{"finish_reason": "content_filter", "text": "a"}]}, "neither stop nor length"),
        ({"choices": [{"finish_reason": "length", "text": ""}]}, "no tokens"),
    ],
)
def test_replies_that_cannot_be_used(reply, rule, tiny_chat, target, chat, tmp_path):
    with serving(target, chat, Behaviour(reply=reply)) as url, pytest.raises(ServerFault, match=rule):
        regenerate(options(tiny_chat, tmp_path / "a.jsonl", url), Recorder())


def test_a_refusal_is_not_repeated(tiny_chat, target, chat, tmp_path, no_waiting):
    with serving(target, chat, Behaviour(codes=[401])) as url, pytest.raises(ServerFault, match=r"refuses \(HTTP 401"):
        regenerate(options(tiny_chat, tmp_path / "a.jsonl", url), Recorder())
    assert no_waiting == []


def test_a_sampled_answer_is_asked_for_with_its_own_seed(tiny_chat, target, chat, tmp_path):
    behaviour, sampling = Behaviour(), Sampling(0.8, 0.9, 5)
    with serving(target, chat, behaviour) as url:
        asked = options(tiny_chat, tmp_path / "a.jsonl", url, temperature=0.8, top_p=0.9, seed=5, limit=3)
        regenerate(asked, Recorder())
    assert {body["seed"] for body in behaviour.seen} == {sampling.seed_of(row, 0) for row in range(3)}
    assert {(body["temperature"], body["top_p"]) for body in behaviour.seen} == {(0.8, 0.9)}
    assert all((row["temperature"], row["seed"]) == (0.8, 5) for row in rows_of(tmp_path / "a.jsonl"))


def test_answers_of_a_server_and_of_the_process_are_not_mixed(tiny_chat, target, chat, tmp_path):
    out = tmp_path / "a.jsonl"
    with serving(target, chat, Behaviour(dies_after=3)) as url, pytest.raises(ServerFault):
        regenerate(options(tiny_chat, out, url, retries=0, concurrency=1), Recorder())
    with pytest.raises(DataError, match="begun with dtype \"the server's\", this command asks for 'float32'"):
        regenerate(options(tiny_chat, out), Recorder())


def test_work_side_by_side():
    assert sorted(side_by_side([3, 1, 2], lambda job: job * job, 2)) == [(1, 1), (2, 4), (3, 9)]
    assert list(side_by_side([], str, 2)) == []

    def fail(job):
        raise ServerFault("gone")

    with pytest.raises(ServerFault, match="gone"):
        list(side_by_side([1, 2], fail, 2))
