"""GGUF files: values, row order, refusals, damage."""

from __future__ import annotations

import numpy as np
import pytest

from jbatch.config import UserError
from jbatch.models.gguf import hugging_face_name, read_gguf, unpermute
from jbatch.models.source import tensor_shapes


def read_everything(path):
    source = read_gguf(path)
    return source, {name: source.tensor(name) for name, _ in tensor_shapes(source.config)}


def refusal(path) -> str:
    """The one line that refuses `path`."""
    with pytest.raises(UserError) as caught:
        read_everything(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize("fixture", ["tiny", "tiny_untied"])
def test_config_and_tensors_survive_the_format(fixture, request, tmp_path):
    model = request.getfixturevalue(fixture)
    source, tensors = read_everything(model.write_gguf(tmp_path / "m.gguf"))
    assert source.config == model.config
    assert tensors.keys() == model.weights.keys()
    for name, value in model.weights.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.03), ("Q4_1", 0.3), ("F16", 0.002), ("BF16", 0.02)])
def test_quantised_tensors_are_dequantised(tiny, tmp_path, kind, error):
    _, tensors = read_everything(tiny.write_gguf(tmp_path / "m.gguf", quantise=kind))
    for name, value in tiny.weights.items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_allclose(tensors[name], value, atol=error, err_msg=name)


def test_unpermute_puts_rotary_halves_together():
    interleaved = np.arange(8.0)[:, None]  # one head: rows x0 y0 x1 y1 ..., pairs rotated together
    assert unpermute(interleaved, 1).ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_tokenizer_is_read(tiny, tmp_path):
    tokenizer = read_gguf(tiny.write_gguf(tmp_path / "m.gguf")).tokenizer
    ids = tokenizer.encode("<|im_start|> the")
    assert ids == [1, tiny.config.vocab_size - 1]
    assert (tokenizer.eos_ids, tokenizer.bos_token) == ({2}, "<|im_start|>")
    assert tokenizer.encode("a", add_special=True) == tokenizer.encode("a")


def test_begin_of_sequence_and_end_of_turn(tiny, tmp_path):
    def extra(writer):
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(0)

    tokenizer = read_gguf(tiny.write_gguf(tmp_path / "m.gguf", extra=extra)).tokenizer
    assert tokenizer.encode("a", add_special=True) == [1, *tokenizer.encode("a")]
    assert tokenizer.eos_ids == {0, 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "qwen2"}, "'qwen2'"),
        ({"tokenizer": "llama"}, "'llama'"),
        ({"pre": "deepseek-llm"}, "'deepseek-llm'"),
        ({"extra": lambda w: w.add_string("llama.rope.scaling.type", "yarn")}, "scaled"),
        ({"extra": lambda w: w.add_rope_dimension_count(4)}, "rotary"),
        ({"tensors": {"rope_freqs.weight": np.ones(4, np.float32)}}, "scaled"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "blk.0.attn_q.bias"),
        ({"tensors": {"blk.1.ffn_down.weight": None}}, "mlp.down_proj.weight is missing"),
        ({"tensors": {"blk.1.attn_k.weight": np.ones((8, 32), np.float32)}}, "(16, 32)"),
        ({"tensors": {"token_embd.weight": np.ones((100, 32), np.float32)}}, "262 tokens"),
        ({"tensors": {"blk.1.attn_v.weight": np.full((16, 32), np.nan, np.float32)}}, "NaN"),
    ],
)
def test_refusals_name_file_and_reason(tiny, tmp_path, changes, says):
    assert says in refusal(tiny.write_gguf(tmp_path / "m.gguf", **changes))


def test_not_a_gguf(tmp_path):
    for content in (b"", b"GG", b"GGUF", b"hello world" * 100):
        (tmp_path / "m.gguf").write_bytes(content)
        assert "not a readable GGUF" in refusal(tmp_path / "m.gguf")
    assert "no such file" in refusal(tmp_path / "missing.gguf")


def test_truncated_anywhere(tiny, tmp_path):
    whole = tiny.write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 600, 37), *np.linspace(600, len(whole) - 1, 40).astype(int)]:
        cut.write_bytes(whole[:size])
        refusal(cut)


def test_damaged_headers_never_escape(tiny, tmp_path):
    whole = tiny.write_gguf(tmp_path / "m.gguf").read_bytes()
    header = len(whole) - sum(w.nbytes for w in tiny.weights.values())
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    for _ in range(150):
        content = bytearray(whole)
        for offset in rng.integers(0, header, rng.integers(1, 4)):
            content[offset] = rng.integers(256)
        damaged.write_bytes(content)
        try:
            read_everything(damaged)  # harmless damage may go unnoticed
        except UserError as error:
            assert "\n" not in str(error)


def test_names():
    assert hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.0.attn_q.bias") == "blk.0.attn_q.bias"
