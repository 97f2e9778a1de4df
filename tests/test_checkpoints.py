"""Transformers and adapters from files, ours against those of the libraries."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedbilevel.errors import InvalidInputError
from fedbilevel.models.checkpoints import read_checkpoint
from fedbilevel.models.peft import packed_adapters, read_adapters
from fedbilevel.models.transformer import (
    Architecture,
    draw_adapters,
    initialize,
    logits,
)

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "eos_token_id": [7, 3],
}
MADE = Architecture(
    *(11, 8, 2, 2, 1, 6, 6, 32),
    head_norm=True,
    tied=False,
    epsilon=1e-6,
    rotary_base=100.0,
)
PLACES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
TOKENS: Any = np.array([[1, 5, 2, 9, 3], [4, 4, 0, 10, 8]], np.int32)


def moved(tree: Any, seed: int = 5) -> Any:
    """Return a tree in which no number is 0 or 1."""
    leaves, structure = jax.tree.flatten(tree)
    draw = np.random.default_rng(seed)
    made = [leaf + 0.3 * draw.standard_normal(leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(structure, made)


@pytest.fixture(scope="module")
def base():
    return moved(initialize(MADE, jr.key(0)))


@pytest.fixture
def folder(base, tmp_path) -> Path:
    """Return a folder of Qwen 3, written tensor by tensor in two files."""
    every = {
        "model.embed_tokens.weight": base.embeddings,
        "model.norm.weight": base.last_norm.weight,
        "lm_head.weight": base.head,
    }
    norms = {
        "input_layernorm": "attention",
        "post_attention_layernorm": "feed_forward",
        "self_attn.q_norm": "query",
        "self_attn.k_norm": "key",
    }
    for n in range(2):
        for name, own in PLACES.items():
            every[f"model.layers.{n}.{own}.weight"] = base.weights[name][n]
        for own, name in norms.items():
            every[f"model.layers.{n}.{own}.weight"] = base.norms[name].weight[n]
    arrays = {name: np.asarray(leaf) for name, leaf in every.items()}
    files = {name: f"model-{k % 2}.safetensors" for k, name in enumerate(arrays)}
    for file in set(files.values()):
        own = {name: arrays[name] for name in arrays if files[name] == file}
        save_file(own, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_in_pieces_is_read_whole(base, folder):
    found = read_checkpoint(folder)
    assert (found.family, found.end) == ("qwen3", 7)
    assert found.transformer.architecture == MADE
    same = jax.tree.map(np.array_equal, found.transformer, base)
    assert all(jax.tree.leaves(same))
    half = read_checkpoint(folder, jnp.bfloat16).transformer
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {np.dtype(jnp.bfloat16)}


def config(**changes):
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    return change


def without_shard(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()


def shard_of_code(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("-1.safetensors", "-1.bin"))


def only_code(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def extended(folder: Path) -> None:
    path = folder / "model-0.safetensors"
    save_file({**load_file(path), "model.extra": np.ones(2)}, path)


def infinite(folder: Path) -> None:
    path = folder / "model-0.safetensors"
    content = load_file(path)
    name = min(content)
    content[name] = np.full(content[name].shape, np.inf)
    save_file(content, path)


def damaged(folder: Path) -> None:
    (folder / "model-0.safetensors").write_bytes(b"not tensors")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without_shard, "model-1.safetensors is missing: part of the weights"),
        (shard_of_code, "names 'model-1.bin': only files .safetensors"),
        (only_code, "holds pytorch_model.bin and no model.safetensors"),
        (damaged, "model-0.safetensors is damaged"),
        (infinite, "holds numbers that float64 does not, or none at all"),
        (extended, "has a tensor model.extra, of which config.json says nothing"),
        (config(model_type="mamba"), "architecture 'mamba' is not known. Known are"),
        (config(vocab_size=12), r"shape \(11, 8\), but config.json makes it \(12, 8\)"),
        (config(hidden_size=-1), "hidden_size is -1, and no size"),
        (config(hidden_act="relu"), "hidden_act is 'relu', and only silu is known"),
        (config(mlp_bias=True), "mlp_bias is True, and only False is known"),
        (config(use_sliding_window=True), "use_sliding_window is True"),
        (config(rope_scaling={"type": "yarn"}), "kind 'yarn' are not known"),
        (config(num_hidden_layers=3), "has no tensor model.layers.2"),
        (lambda folder: (folder / "config.json").unlink(), "there is no .*config.json"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_wrong_with_a_folder_is_told(folder, change, told):
    change(folder)
    with pytest.raises(InvalidInputError, match=told) as error:
        read_checkpoint(folder)
    assert "\n" not in str(error.value)


def kept(adapters, family: str, folder: Path, base: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in packed_adapters(adapters, family, base).items():
        (folder / name).write_bytes(content)
    return folder


GPT2 = replace(
    MADE,
    **{"groups": 2, "head_width": 4, "head_norm": False, "tied": True},
    **{"positions": "learned", "norm": "layer", "feed_forward": "gelu-tanh"},
    biased=("query", "key", "value", "output", "up", "down"),
)


def test_adapters_come_back_as_they_were(tmp_path):
    """Single precision is what is kept. Of GPT-2 the function comes back."""
    chosen = ("query", "value", "down")
    drawn = moved(draw_adapters(MADE, chosen, 2, 1.5, jr.key(1)))
    found: Any = read_adapters(kept(drawn, "qwen3", tmp_path), MADE, "qwen3")
    assert set(found) == set(chosen)
    for name, one in found.items():
        assert one.scale == 1.5
        np.testing.assert_allclose(one.a, drawn[name].a, rtol=1e-6)
        np.testing.assert_allclose(one.b, drawn[name].b, rtol=1e-6)
    drawn = moved(draw_adapters(GPT2, chosen, 2, 1.5, jr.key(1)))
    found: Any = read_adapters(kept(drawn, "gpt2", tmp_path / "gpt2"), GPT2, "gpt2")
    assert set(found) == {*chosen, "key"}
    for name, one in drawn.items():
        expected = one.scale * np.einsum("nor,nri->noi", one.b, one.a)
        made = found[name].scale * np.einsum(
            "nor,nri->noi", found[name].b, found[name].a
        )
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    assert not np.any(np.asarray(found["key"].b))


def test_what_is_wrong_with_adapters_is_told(tmp_path):
    drawn = moved(draw_adapters(MADE, ("query",), 2, 1.5, jr.key(1)))
    kept(drawn, "qwen3", tmp_path)
    with pytest.raises(InvalidInputError, match=r"has the shape \(12, 2\), not"):
        read_adapters(tmp_path, replace(MADE, heads=4), "qwen3")
    with pytest.raises(InvalidInputError, match="belongs to no gpt2 of 2 blocks"):
        read_adapters(tmp_path, GPT2, "gpt2")
    path = tmp_path / "adapter_config.json"
    path.write_text(path.read_text().replace('"LORA"', '"IA3"'))
    with pytest.raises(InvalidInputError, match="peft_type is 'IA3', and only 'LORA'"):
        read_adapters(tmp_path, MADE, "qwen3")


# Against the libraries, where they are installed

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OF_GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "llama3": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3}),
    "smollm": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8}),
    "gpt2": ("GPT2Config", OF_GPT2),
}


@pytest.fixture(scope="module")
def libraries():
    return tuple(map(pytest.importorskip, ("torch", "transformers", "peft")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_adapters_are_those_of_the_libraries(family, libraries, tmp_path):
    torch, transformers, peft = libraries
    torch.manual_seed(0)
    kind, sizes = FAMILIES[family]
    made = getattr(transformers, kind)(**sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    theirs = theirs.eval()
    theirs.save_pretrained(tmp_path / "base", max_shard_size="10KB")
    tokens = np.random.default_rng(0).integers(0, 40, (2, 60)).astype(np.int32)

    def expected(model):
        with torch.no_grad():
            return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()

    found = read_checkpoint(tmp_path / "base")
    run = jax.jit(logits)
    plain = np.asarray(run(found.transformer, {}, tokens))
    np.testing.assert_allclose(plain, expected(theirs), atol=1e-4)
    # Ours in theirs.
    chosen = ("query", "value", "output", "up")
    own = found.transformer.architecture
    drawn = moved(draw_adapters(own, chosen, 3, 0.5, jr.key(1)))
    kept(drawn, found.family, tmp_path / "ours", str(tmp_path / "base"))
    loaded = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "ours"))
    adapted = np.asarray(run(found.transformer, drawn, tokens))
    assert np.abs(adapted - plain).max() > 0.1
    np.testing.assert_allclose(adapted, expected(loaded), atol=1e-4)
    # And back.
    loaded.save_pretrained(str(tmp_path / "theirs"))
    back = read_adapters(tmp_path / "theirs", own, found.family)
    again = np.asarray(run(found.transformer, back, tokens))
    np.testing.assert_allclose(again, adapted, atol=1e-4)
