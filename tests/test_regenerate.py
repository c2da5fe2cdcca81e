"""`regenerate`: batched greedy answers against one prompt at a time, and a file that does not depend on kills."""

import json
from pathlib import Path

import pytest
import torch
from capture_fixtures import (
    ROOT,
    THINKING_TEMPLATE,
    Recorder,
    capture_options,
    copy_tokenizer,
    random_target,
    write_jsonl,
)

from cache.read import open_cache
from capture import regenerate as module
from capture.generate import greedy_answers
from capture.journal import partial_path
from capture.lines import scan_files
from capture.prompts import read_prompts
from capture.regenerate import prompt_batches, regenerate
from capture.run import capture
from schemas.errors import CaptureFault, DataError, OptionError, TargetError
from schemas.options import RegenerateOptions
from target.chat import open_chat, prompt_ids
from target.head import HeadTraits, head_traits
from target.load import load_target, resolve_target
from target.tokens import tokenizer_sha256

PROMPTS = ROOT / "demo" / "prompts.jsonl"


@pytest.fixture(scope="module")
def target(tiny_chat):
    return load_target(resolve_target(tiny_chat), "float32", "cpu")


@pytest.fixture(scope="module")
def chat(tiny_chat):
    return open_chat(resolve_target(tiny_chat))


def options(tiny_chat, prompts, out, **changes):
    small = {"max_new_tokens": 24, "dtype": "float32", "device": "cpu", "batch_tokens": 400}
    return RegenerateOptions(target=str(tiny_chat), prompts=str(prompts), out=str(out), **{**small, **changes})


def alone(target, ids, max_new_tokens, eos):
    """Greedy decoding of one prompt without a cache, a batch or padding."""
    ids, answer = list(ids), []
    with torch.inference_mode():
        while len(answer) < max_new_tokens and (not answer or answer[-1] not in eos):
            answer.append(int(target.model(torch.tensor([ids + answer]), use_cache=False).logits[0, -1].argmax()))
    return answer


def test_batches_answer_as_one_at_a_time(target, chat):
    (scan,) = scan_files((str(PROMPTS),), 20)
    prompts = [prompt_ids(chat, prompt.first_messages()) for prompt in read_prompts(scan)]
    assert len({len(ids) for ids in prompts}) > 5
    expected = [alone(target, ids, 40, chat.eos) for ids in prompts]
    assert {len(answer) == 40 and answer[-1] not in chat.eos for answer in expected} == {True, False}
    assert greedy_answers(target, head_traits(target.config), prompts, 40, chat.eos) == expected
    with torch.inference_mode():
        for ids, answer in zip(prompts[:4], expected[:4], strict=True):
            theirs = target.model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[
                0, len(ids) :
            ].tolist()
            assert answer == theirs


def test_logits_that_are_not_finite_are_a_fault(target, chat):
    with pytest.raises(CaptureFault, match="not finite at token 1"):
        greedy_answers(target, HeadTraits(logit_scale=float("nan")), [[1, 2]], 4, chat.eos)


def test_prompt_batches():
    lengths = [3, 9, 5, 7, 30]
    assert list(prompt_batches(lengths, 10, 40)) == [[4], [1, 3], [2, 0]]
    assert list(prompt_batches([100], 10, 40)) == [[0]]


@pytest.fixture(scope="module")
def answered(tiny_chat, tmp_path_factory):
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    say = Recorder()
    summary = regenerate(options(tiny_chat, PROMPTS, out, limit=30), say)
    assert (summary.prompts, summary.rows, summary.answers) == (30, 30, 30)
    assert say.steps[-1] == ("regenerate", 30, 30)
    return out


def test_rows(answered, chat, target, tiny_chat):
    rows = [json.loads(line) for line in answered.read_text().splitlines()]
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:30]]
    assert not partial_path(answered).exists()
    for row, prompt in zip(rows, prompts, strict=True):
        assert row["id"] == prompt["id"]
        assert row["messages"][0] == {"role": "user", "content": prompt["turns"][0]}
        assert row["tokenizer_sha256"] == tokenizer_sha256(resolve_target(tiny_chat))
        assert (row["target"], row["max_new_tokens"]) == ("tiny-chat", 24)
        given = prompt_ids(chat, row["messages"][:1])
        answer = row["input_ids"][len(given) :]
        assert row["input_ids"][: len(given)] == given
        assert row["loss_mask"] == [0] * len(given) + [1] * len(answer)
        assert row["finished"] == (answer[-1] == 2)
        assert len(answer) <= 24
        text = chat.tokenizer.decode(answer[:-1] if row["finished"] else answer)
        assert row["messages"][1] == {"role": "assistant", "content": text}
    assert {row["finished"] for row in rows} == {True, False}
    assert rows[5]["input_ids"] == prompt_ids(chat, rows[5]["messages"][:1]) + alone(
        target, prompt_ids(chat, rows[5]["messages"][:1]), 24, chat.eos
    )


def test_capture_takes_the_ids_as_they_are(answered, tiny_chat, tmp_path):
    capture(capture_options(tiny_chat, str(answered), tmp_path / "hs", layers=(1,)), Recorder())
    cache = open_cache(str(tmp_path / "hs"))
    rows = [json.loads(line) for line in answered.read_text().splitlines()]
    for entry in cache.index.to_pylist():
        ids, mask = cache.tokens(entry["offset"], entry["length"])
        row = rows[entry["source_row"]]
        assert ids.tolist() == row["input_ids"]
        assert mask.int().tolist() == row["loss_mask"]
        assert entry["row_id"] == row["id"]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("batches", [0, 1, 2])
@pytest.mark.parametrize("tear", [False, True])
def test_going_on_gives_the_same_file(answered, tiny_chat, tmp_path, monkeypatch, batches, tear):
    out = tmp_path / "answers.jsonl"
    add, added = module.add_batch, []

    def stop(*args):
        if len(added) == batches:
            raise StoppedError
        added.append(args)
        add(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "add_batch", stop)
        with pytest.raises(StoppedError):
            regenerate(options(tiny_chat, PROMPTS, out, limit=30), Recorder())
    assert not out.exists()
    if tear:
        with partial_path(out).open("ab") as file:
            file.write(b'{"turn":0,"rows":[1,2],"ans')
    say = Recorder()
    again = []
    monkeypatch.setattr(module, "add_batch", lambda *args: (again.append(args), add(*args)))
    regenerate(options(tiny_chat, PROMPTS, out, limit=30), say)
    assert out.read_bytes() == answered.read_bytes()
    done = {row for args in added for row in args[2]}
    assert {row for args in again for row in args[2]} == set(range(30)) - done
    assert any("going on" in note for note in say.notes) == (batches > 0)


def test_a_finished_file_is_left_alone(answered, tiny_chat, monkeypatch):
    monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("the weights are not needed"))
    before = answered.read_bytes()
    say = Recorder()
    assert regenerate(options(tiny_chat, PROMPTS, answered, limit=30), say) is None
    assert "nothing to do" in say.notes[-1]
    assert answered.read_bytes() == before


def test_several_turns(tiny_chat, chat, target, tmp_path):
    rows = [{"turns": ["What is the capital of Japan?", "And of France?"]}, {"prompt": "Hi"}]
    out = tmp_path / "two.jsonl"
    summary = regenerate(options(tiny_chat, write_jsonl(tmp_path / "p.jsonl", rows), out), Recorder())
    assert (summary.prompts, summary.rows, summary.answers) == (2, 2, 3)
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "user", "assistant"]
    given = prompt_ids(chat, first["messages"][:1])
    answer = alone(target, given, 24, chat.eos)
    later = prompt_ids(chat, first["messages"][:3])
    last = alone(target, later, 24, chat.eos)
    assert first["input_ids"] == later + last
    supervised = [0] * len(given) + [1] * len(answer) + [0] * (len(later) - len(given) - len(answer)) + [1] * len(last)
    assert first["loss_mask"] == supervised
    assert "id" not in second
    assert regenerate(options(tiny_chat, tmp_path / "p.jsonl", out), Recorder()) is None


def test_templates_that_rewrite_turns_give_a_row_per_turn(tmp_path):
    folder = Path(random_target(tmp_path / "thinks"))
    # Earlier answers are shown in capitals: a later turn's context never continues the row before it.
    template = THINKING_TEMPLATE.replace("content.lstrip('\n')", "('' if loop.last else 'SAID ') + content")
    copy_tokenizer(folder, template)
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"turns": ["one", "two"]}])
    summary = regenerate(options(folder, prompts, tmp_path / "out.jsonl", max_new_tokens=5), Recorder())
    assert (summary.prompts, summary.rows, summary.answers) == (1, 2, 2)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row["messages"]) for row in rows] == [2, 4]
    assert [sum(row["loss_mask"]) for row in rows] == [5, 5]
    assert regenerate(options(folder, prompts, tmp_path / "out.jsonl", max_new_tokens=5), Recorder()) is None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"max_new_tokens": 8}, "max_new_tokens 24.*8"),
        ({"limit": 29}, "answers other prompts"),
        ({"limit": 31}, "answers 30 prompts, 31 are asked for"),
    ],
)
def test_other_settings_are_refused(answered, tiny_chat, changes, rule):
    before = answered.read_bytes()
    with pytest.raises(DataError, match=rule) as caught:
        regenerate(options(tiny_chat, PROMPTS, answered, **{"limit": 30, **changes}), Recorder())
    assert caught.value.exit_code == 2
    assert answered.read_bytes() == before


def test_an_unfinished_run_of_other_settings_is_refused(tiny_chat, tmp_path, monkeypatch):
    out = tmp_path / "a.jsonl"
    monkeypatch.setattr(module, "greedy_answers", lambda *_: (_ for _ in ()).throw(StoppedError))
    with pytest.raises(StoppedError):
        regenerate(options(tiny_chat, PROMPTS, out, limit=3), Recorder())
    with pytest.raises(DataError, match="begun with max_new_tokens 24, this command asks for 9"):
        regenerate(options(tiny_chat, PROMPTS, out, limit=3, max_new_tokens=9), Recorder())
    for diary in ("a diary\n", "a diary", "7\n", '{"max_new_tokens": 24}\n{"turn": 0}\n'):
        partial_path(out).write_text(diary)
        with pytest.raises(DataError, match=r"no unfinished run|begun with"):
            regenerate(options(tiny_chat, PROMPTS, out, limit=3), Recorder())
        assert partial_path(out).read_text() == diary
    partial_path(out).unlink()
    partial_path(out).mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        regenerate(options(tiny_chat, PROMPTS, out, limit=3), Recorder())


def test_refusals_write_nothing(tiny_chat, tmp_path):
    diary = tmp_path / "diary.txt"
    diary.write_text("dear diary\n")
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])
    before = sorted(path.name for path in tmp_path.iterdir())
    cases = [
        (options(tiny_chat, prompts, diary), DataError, "something else"),
        (options(tiny_chat, prompts, prompts), DataError, "is the prompts file"),
        (options(tiny_chat, prompts, tmp_path), DataError, "is a folder"),
        (options(tiny_chat, prompts, diary / "o"), OptionError, "is a file, not a folder"),
        (options(tiny_chat, prompts, tmp_path / "o", attn="toaster"), TargetError, "--attn toaster"),
        (options("nobody/nothing", prompts, tmp_path / "o"), TargetError, "nobody/nothing"),
        (options(tiny_chat, tmp_path / "none", tmp_path / "o"), DataError, "no such file"),
    ]
    for asked, error, rule in cases:
        with pytest.raises(error, match=rule):
            regenerate(asked, Recorder())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert diary.read_text() == "dear diary\n"
