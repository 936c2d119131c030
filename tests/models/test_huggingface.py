"""Hugging Face directories and the hub: values, refusals, damage."""

from __future__ import annotations

import json

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jbatch.config import UserError
from jbatch.models.gguf import read_gguf
from jbatch.models.huggingface import fetch_from_hub, read_huggingface
from jbatch.models.load import convert
from jbatch.models.source import tensor_shapes


def refusal(directory) -> str:
    """The one line that refuses `directory`."""
    with pytest.raises(UserError) as caught:
        convert(read_huggingface(directory), "float32")
    message = str(caught.value)
    assert str(directory) in message and "\n" not in message
    return message


@pytest.mark.parametrize("fixture", ["tiny", "tiny_untied"])
@pytest.mark.parametrize("shards", [1, 3])
def test_same_params_as_from_gguf(fixture, shards, request, tmp_path):
    model = request.getfixturevalue(fixture)
    directory = read_huggingface(model.write_huggingface(tmp_path / "m", shards=shards))
    file = read_gguf(model.write_gguf(tmp_path / "m.gguf"))
    assert directory.config == file.config == model.config
    a, b = convert(directory, "float32"), convert(file, "float32")
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert directory.tokenizer.backend.to_str() == file.tokenizer.backend.to_str()
    for attribute in ("eos_ids", "bos_token", "eos_token", "chat_template"):
        assert getattr(directory.tokenizer, attribute) == getattr(file.tokenizer, attribute)


def test_bfloat16_weights(tiny, tmp_path):
    directory = tiny.write_huggingface(tmp_path / "m")
    short = {name: value.astype(ml_dtypes.bfloat16) for name, value in tiny.weights.items()}
    save_file(short, directory / "model.safetensors")
    source = read_huggingface(directory)
    for name, _ in tensor_shapes(source.config):
        np.testing.assert_array_equal(source.tensor(name).astype(np.float32), short[name].astype(np.float32))


def test_newer_rope_parameters_and_mistral(tiny, tmp_path):
    config = {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    config |= {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert read_huggingface(tiny.write_huggingface(tmp_path / "m", **config)).config.rope_theta == 5e5


def test_end_of_sequence_ids_and_template_of_every_file(tiny, tmp_path):
    directory = tiny.write_huggingface(tmp_path / "m", eos_token_id=None)
    (directory / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    (directory / "chat_template.jinja").write_text("newer")
    tokenizer = read_huggingface(directory).tokenizer
    assert tokenizer.eos_ids == {0, 1, 2}
    assert tokenizer.chat_template == "newer"


def test_weights_that_may_be_ignored(tiny, tmp_path):
    directory = tiny.write_huggingface(tmp_path / "m")
    extra = {"lm_head.weight": tiny.weights["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tiny.weights | extra, directory / "model.safetensors")
    assert "lm_head.weight" not in read_huggingface(directory).shapes


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"attention_bias": True}, "bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled rotary"),
        ({"rope_scaling": "linear"}, "scaled rotary"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 10**9}, "missing"),
        ({"num_attention_heads": 0}, "not positive"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"vocab_size": -1}, "not positive"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rms_norm_eps": True}, "rms_norm_eps"),
    ],
)
def test_refused_configs(tiny, tmp_path, config, says):
    assert says in refusal(tiny.write_huggingface(tmp_path / "m", **config))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_truncated_and_damaged_files(tiny, tmp_path, name):
    directory = tiny.write_huggingface(tmp_path / "m")
    whole = (directory / name).read_bytes()
    for size in np.linspace(0, len(whole) - 1, 25).astype(int):
        (directory / name).write_bytes(whole[:size])
        assert name in refusal(directory)
    (directory / name).write_bytes(b"\xff\xfe" + whole)
    assert name in refusal(directory)
    (directory / name).unlink()
    assert f"{name} is missing" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_flipped_bytes_never_escape(tiny, tmp_path, name):
    directory = tiny.write_huggingface(tmp_path / "m")
    whole = (directory / name).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(0, min(len(whole), 2500))] = rng.integers(256)
        (directory / name).write_bytes(content)
        try:
            convert(read_huggingface(directory), "float32")  # harmless damage may go unnoticed
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "gone"}}', "{"])
def test_damaged_index(tiny, tmp_path, index):
    directory = tiny.write_huggingface(tmp_path / "m", shards=2)
    (directory / "model.safetensors.index.json").write_text(index)
    refusal(directory)


def test_index_cannot_point_outside(tiny, tmp_path):
    directory = tiny.write_huggingface(tmp_path / "m", shards=2)
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "secret.safetensors is missing" in refusal(directory)


def test_hub_errors_become_one_line(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"org/name .*no route\): check the name"):
        fetch_from_hub("org/name", print)


def test_hub_downloads_only_what_is_read(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or str(tmp_path)
    )
    assert fetch_from_hub("org/name", print) == tmp_path
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["allow_patterns"])
