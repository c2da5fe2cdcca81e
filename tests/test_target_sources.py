"""Where weights come from: sharded files, a model's own code, GGUF, quantised checkpoints; captured whole, or refused in a line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from capture_fixtures import Recorder, capture_options, copy_tokenizer, shipped_rows, write_jsonl
from gguf_fixtures import write_gguf
from safetensors.torch import load_file, save_file
from target_fixtures import FLAT, KINDS, LAYERS, make_model, make_target
from test_target_kinds import check_files, check_rows, hooked, reference

from cache.read import open_cache
from capture.run import capture
from schemas.errors import DflashError, TargetError
from target import gguf as gguf_module
from target.load import load_target, resolve_target

ALL = tuple(range(LAYERS))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", shipped_rows(6))


def run_capture(target, data, out, **options):
    return capture(capture_options(str(target), data, out, layers=ALL, top_k=6, **options), Recorder())


# Files


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied"])
def test_a_sharded_checkpoint(data, tmp_path, kind):
    make_target(kind, tmp_path / "m", max_shard_size="200KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
    run_capture(tmp_path / "m", data, tmp_path / "c")
    run, model = reference(tmp_path / "m")
    check_rows(tmp_path / "c", run)
    check_files(tmp_path / "c", model, model.model.norm)


def test_a_checkpoint_of_the_text_alone_is_enough_of_a_wrapper(data, tmp_path):
    folder = Path(make_target("kimi-k2.5", tmp_path / "m"))
    run, _ = reference(folder, "model.language_model.", tf.AutoModelForImageTextToText)
    weights = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in weights.items() if "vision" not in name and "projector" not in name}
    assert len(text) < len(weights)
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    run_capture(folder, data, tmp_path / "c")
    check_rows(tmp_path / "c", run)
    lost = {name: tensor for name, tensor in text.items() if "blocks.2.self_attn.o_proj" not in name}
    assert len(lost) == len(text) - 1
    save_file(lost, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"1 weights are missing.*layers\.2\.self_attn\.o_proj"):
        load_target(resolve_target(str(folder)), device="cpu")


# Code that comes with the model

OWN_CODE = """
from pathlib import Path
Path({trace!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "of-its-own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.config.logit_scale
        return output
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A Llama whose code, in its own folder, scales its logits; a trace shows whether that code ran."""
    for place in ("transformers.dynamic_module_utils.HF_MODULES_CACHE", "transformers.utils.hub.HF_MODULES_CACHE"):
        monkeypatch.setattr(place, str(tmp_path / "modules"), raising=False)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    folder = tmp_path / "own"
    model = make_model(tf.LlamaConfig(**FLAT))
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "of-its-own", "architectures": ["OwnForCausalLM"], "logit_scale": 0.5, "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(OWN_CODE.format(trace=str(tmp_path / "trace")))
    return folder, model, tmp_path / "trace"


def test_a_models_own_code_runs_where_the_user_says_so(own, data, tmp_path):
    folder, model, trace = own
    manifest = run_capture(folder, data, tmp_path / "c", trust_remote_code=True)
    assert trace.exists()
    assert manifest.identity.target.architectures == ("OwnForCausalLM",)
    assert manifest.identity.target.logit_scale == 0.5
    plain = hooked(model)
    check_rows(tmp_path / "c", lambda ids: (lambda states, logits, rows: (states, logits * 0.5, rows))(*plain(ids)))


def test_a_models_own_code_does_not_run_otherwise(own, data, tmp_path):
    folder, _, trace = own
    with pytest.raises(TargetError, match=r"its own code \(modeling_own\.py\), which was not run.*--trust-remote-code"):
        run_capture(folder, data, tmp_path / "c")
    assert not trace.exists() and not (tmp_path / "c").exists()


def test_a_tokenizers_own_code_is_named_too(tmp_path, data):
    folder = Path(make_target("qwen3", tmp_path / "m"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"its own code \(tokenization_own\.py\), which was not run"):
        run_capture(folder, data, tmp_path / "c")


def test_code_beside_a_model_that_transformers_knows_is_not_needed(tmp_path, data):
    folder = Path(make_target("qwen3", tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_gone.Gone", "AutoModelForCausalLM": "modeling_gone.Gone"}
    (folder / "config.json").write_text(json.dumps(config))
    assert run_capture(folder, data, tmp_path / "c").complete


# GGUF


@pytest.mark.parametrize(("tied", "quantised", "given"), [(False, True, "file"), (True, False, "folder")])
def test_a_gguf_file(data, tmp_path, tied, quantised, given):
    (tmp_path / "m").mkdir()
    model = write_gguf(tmp_path / "m" / "tiny.gguf", tied, quantised)
    target = tmp_path / "m" / "tiny.gguf" if given == "file" else tmp_path / "m"
    manifest = run_capture(target, data, tmp_path / "c")
    named = manifest.identity.target
    assert (named.name, named.architectures, named.tied) == ("tiny", ("LlamaForCausalLM",), tied)
    check_rows(tmp_path / "c", hooked(model))
    check_files(tmp_path / "c", model, model.model.norm)
    config = open_cache(str(tmp_path / "c")).target_config
    assert (config["eos_token_id"], config["bos_token_id"]) == ([2], None), "the file's own, not the class's defaults"
    if given == "folder":
        return
    # The same text is the same ids as with the tokenizer that went into the file, and a rerun finds its own.
    run_capture(make_target("llama", tmp_path / "l"), data, tmp_path / "d")
    ids = [open_cache(str(tmp_path / name)).index["tokens_sha256"].to_pylist() for name in "cd"]
    assert ids[0] == ids[1]
    say = Recorder()
    capture(capture_options(str(target), data, tmp_path / "c", layers=ALL, top_k=6), say)
    assert "nothing to do" in say.notes[-1]


def test_files_beside_a_gguf_file_come_first(data, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", rope__scaling__type="linear", rope__scaling__factor=2.0)
    with pytest.raises(TargetError, match=r"transformers drops llama\.rope\.scaling .*config\.json beside it"):
        resolve_target(str(tmp_path / "tiny.gguf"))
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    config = tf.LlamaConfig(**FLAT | {"intermediate_size": 64}, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    copy_tokenizer(tmp_path)
    ref = resolve_target(str(tmp_path / "tiny.gguf"))
    assert (ref.folder / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert load_target(ref, "float32", "cpu").config.rope_parameters["factor"] == 2.0


def test_a_gguf_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(TargetError, match=r"'torn\.gguf': cannot read the GGUF file") as caught:
        resolve_target(str(tmp_path / "torn.gguf"))
    assert "\n" not in str(caught.value)
    shutil.copy(tmp_path / "torn.gguf", tmp_path / "other.gguf")
    with pytest.raises(TargetError, match=r"holds 2 GGUF files \(other\.gguf, torn\.gguf \.\.\.\): give the one"):
        resolve_target(str(tmp_path))
    monkeypatch.setattr(gguf_module, "is_gguf_available", lambda: False)
    with pytest.raises(
        TargetError, match=r"takes the packages gguf and accelerate: pip install 'dflash-pipeline\[demo\]'"
    ):
        resolve_target(str(tmp_path / "torn.gguf"))


def test_a_disk_that_is_full_while_a_gguf_file_is_unpacked_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_module, "_write_config", lambda *_: Path("/dev/full").write_text("{}"))
    with pytest.raises(DflashError, match=r"No space left on device\): free some space \(TMPDIR") as caught:
        resolve_target(str(tmp_path / "tiny.gguf"))
    assert not isinstance(caught.value, TargetError)


# Quantised checkpoints


def quantise_fp8(folder, block=16):
    """Rewrite a checkpoint's projections as fine-grained fp8; returns the weights that they stand for."""
    weights, plain = load_file(folder / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        plain[name] = weight
        if "_proj." not in name:
            continue
        rows, columns = weight.shape
        tiles = weight.reshape(rows // block, block, columns // block, block)
        scale = tiles.abs().amax(dim=(1, 3)) / 448
        packed = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name] = packed.reshape(rows, columns)
        weights[name.replace(".weight", ".weight_scale_inv")] = scale
        plain[name] = (packed.float() * scale[:, None, :, None]).reshape(rows, columns)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return plain


def with_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU fp8 stays fp8, whose products round otherwise")
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_fp8_checkpoint_is_captured_as_what_it_stands_for(data, tmp_path, kind):
    folder = Path(make_target(kind, tmp_path / "m"))
    plain = quantise_fp8(folder)
    with_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    run_capture(folder, data, tmp_path / "c")
    model = make_model(KINDS[kind]())
    model.load_state_dict(plain)
    check_rows(tmp_path / "c", hooked(model))
    check_files(tmp_path / "c", model, model.model.norm)
    assert {tensor.dtype for tensor in load_file(tmp_path / "c" / "target" / "head.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "optimum"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "compressed"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "of-tomorrow"}, "does not know this method"),
    ],
)
def test_what_transformers_cannot_read_here_is_refused_before_weights_load(data, tmp_path, monkeypatch, method, reason):
    folder = Path(make_target("qwen3", tmp_path / "m"))
    with_config(folder, quantization_config=method)
    monkeypatch.setattr("capture.run.load_target", lambda *_: pytest.fail("the weights are not needed"))
    with pytest.raises(TargetError, match=rf"weights quantised with {method['quant_method']} .*{reason}") as caught:
        run_capture(folder, data, tmp_path / "c")
    assert "\n" not in str(caught.value) and "unquantised" in str(caught.value)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def test_an_mxfp4_checkpoint_is_captured_as_what_it_stands_for(data, tmp_path):
    """GPT-OSS as published: experts in blocks of 32 four-bit values with a power of two each."""
    folder = Path(make_target("gpt-oss", tmp_path / "m"))
    config = KINDS["gpt-oss"]()
    config.intermediate_size = 32
    model = make_model(config)
    weights, generator = dict(model.state_dict()), torch.Generator().manual_seed(3)
    plain = dict(weights)
    for name, weight in list(weights.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inside, outside = weight.shape
        codes = torch.randint(0, 16, (experts, outside, inside // 32, 32), generator=generator)
        scales = torch.randint(124, 127, codes.shape[:3], generator=generator)
        values = FP4[codes] * torch.exp2(scales[..., None].float() - 127)
        plain[name] = values.reshape(experts, outside, inside).transpose(1, 2).contiguous()
        del weights[name]
        weights[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        weights[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]}
    with_config(folder, intermediate_size=32, quantization_config=method)
    run_capture(folder, data, tmp_path / "c")
    model.load_state_dict(plain)
    check_rows(tmp_path / "c", hooked(model))
