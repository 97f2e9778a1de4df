"""Transformers from folders as Hugging Face writes them, without its library.

A folder holds `config.json` and `model.safetensors`, or several such files and
`model.safetensors.index.json`, which says what is where. Known are Llama (and SmolLM,
which is one), Qwen 2 and 2.5, Qwen 3, and GPT-2. Files that can hold code (.bin, .pt)
are refused. Every tensor is checked: none is missing, of another shape, or left over.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedbilevel.errors import FedbilevelError, InvalidInputError
from fedbilevel.models.transformer import (
    Architecture,
    Norm,
    RotaryScaling,
    Transformer,
    projection_shapes,
)

__all__ = [
    "Checkpoint",
    "Names",
    "json_object",
    "names_of",
    "read_checkpoint",
    "tensors_of",
]

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_LONGEST = 2**24  # bytes of JSON
_LARGEST = 2**20  # of any size that a config tells
_FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
# Constants that older files hold.
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Names(NamedTuple):
    """What a family calls its tensors; those of a block follow `block` and a number."""

    prefix: str
    block: str
    embeddings: str
    last_norm: str
    projections: Mapping[str, str]
    norms: Mapping[str, str]


_LLAMA = Names(
    "model.",
    "layers",
    "embed_tokens",
    "norm",
    {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    {
        "attention": "input_layernorm",
        "feed_forward": "post_attention_layernorm",
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    },
)
# GPT-2 has queries, keys and values in one matrix, `attn.c_attn`.
_GPT2 = Names(
    "transformer.",
    "h",
    "wte",
    "ln_f",
    {"output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    {"attention": "ln_1", "feed_forward": "ln_2"},
)
_FUSED = "attn.c_attn"


def names_of(family: str) -> Names:
    """Return what a family calls its tensors."""
    return _GPT2 if family == "gpt2" else _LLAMA


class Checkpoint(NamedTuple):
    """A transformer, its family, and the token that ends a text, if it is told."""

    transformer: Transformer
    family: str
    end: int | None


def read_checkpoint(folder: Path | str, kind: Any = None) -> Checkpoint:
    """Read a folder; numbers become `kind`, or else JAX's usual floats."""
    place = Path(folder)
    config = _Config(place / _CONFIG, json_object(place / _CONFIG))
    family = config.family()
    made = config.gpt2() if family == "gpt2" else config.llama(family)
    tensors = tensors_of(place)
    kind = jnp.zeros((), float).dtype if kind is None else kind
    reader = _Reader(place, tensors, names_of(family), made, kind)
    transformer = reader.gpt2() if family == "gpt2" else reader.llama()
    reader.check_all_read()
    return Checkpoint(transformer, family, config.end(made.vocabulary))


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file, and say what is wrong with it."""
    if not path.is_file():
        raise InvalidInputError(
            f"there is no {path}: a checkpoint is a folder with {_CONFIG} and "
            f"{_WEIGHTS}, as Hugging Face writes it."
        )
    try:
        if path.stat().st_size > _LONGEST:
            raise ValueError("it is too long")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is damaged: {error}.") from None
    if not isinstance(found, dict):
        raise InvalidInputError(f"{path} is damaged: it holds no JSON object.")
    return found


class _Config(NamedTuple):
    """What `config.json` tells, checked as it is read."""

    path: Path
    held: Mapping[str, Any]

    def wrong(self, what: str) -> InvalidInputError:
        return InvalidInputError(f"{self.path}: {what}")

    def family(self) -> str:
        found = self.held.get("model_type")
        if found not in _FAMILIES:
            raise self.wrong(
                f"the architecture {found!r:.60} is not known. Known are "
                f"{', '.join(_FAMILIES)}."
            )
        return found

    def size(self, name: str, usual: int | None = None) -> int:
        found = self.held.get(name)
        found = usual if found is None else found
        if type(found) is not int or not 1 <= found <= _LARGEST:
            raise self.wrong(f"{name} is {found!r:.40}, and no size.")
        return found

    def number(self, held: Mapping[str, Any], name: str, usual: Any = None) -> float:
        found = held.get(name, usual)
        if type(found) not in (int, float) or not 0 < found < 1e12:
            raise self.wrong(f"{name} is {found!r:.40}, and no number above 0.")
        return float(found)

    def only(self, name: str, *allowed: Any) -> Any:
        """Return a value, and raise if it asks for what there is not."""
        found = self.held.get(name, allowed[0])
        if found not in allowed:
            told = " or ".join(map(str, allowed))
            raise self.wrong(f"{name} is {found!r:.60}, and only {told} is known.")
        return found

    def end(self, vocabulary: int) -> int | None:
        found = self.held.get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        right = type(found) is int and 0 <= found < vocabulary
        return found if right else None

    def llama(self, family: str) -> Architecture:
        self.only("hidden_act", "silu")
        self.only("mlp_bias", False)
        self.only("use_sliding_window", False, None)
        width, heads = self.size("hidden_size"), self.size("num_attention_heads")
        biased = ("query", "key", "value")
        if family != "qwen2":
            every = self.only("attention_bias", False, True)
            biased = (*biased, "output") if every else ()
        base, scaling = self._rotary()
        return Architecture(
            self.size("vocab_size"),
            width,
            self.size("num_hidden_layers"),
            heads,
            self.size("num_key_value_heads", heads),
            self.size("head_dim", max(width // heads, 1)),
            self.size("intermediate_size"),
            self.size("max_position_embeddings"),
            biased=biased,
            head_norm=family == "qwen3",
            tied=self.only("tie_word_embeddings", False, True),
            epsilon=self.number(self.held, "rms_norm_eps", 1e-6),
            rotary_base=base,
            rotary_scaling=scaling,
        )

    def _rotary(self) -> tuple[float, RotaryScaling | None]:
        """Return the base and the scaling, as files of two ages tell them."""
        held = self.held.get("rope_parameters") or self.held.get("rope_scaling") or {}
        if not isinstance(held, dict):
            raise self.wrong("rope_parameters are no JSON object.")
        usual = self.held.get("rope_theta", 10000.0)
        base = self.number(held, "rope_theta", usual)
        kind = held.get("rope_type", held.get("type", "default"))
        if kind == "default":
            return base, None
        if kind != "llama3":
            raise self.wrong(
                f"positions of the kind {kind!r:.40} are not known, only default and "
                "llama3."
            )
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factors = (self.number(held, name) for name in names)
        original = self.number(held, "original_max_position_embeddings")
        return base, RotaryScaling(*factors, original=int(original))

    def gpt2(self) -> Architecture:
        kind = self.only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
        self.only("scale_attn_weights", True)
        self.only("scale_attn_by_inverse_layer_idx", False)
        self.only("add_cross_attention", False)
        self.only("tie_word_embeddings", True)
        width, heads = self.size("n_embd"), self.size("n_head")
        return Architecture(
            self.size("vocab_size"),
            width,
            self.size("n_layer"),
            heads,
            heads,
            max(width // heads, 1),
            self.size("n_inner", 4 * width),
            self.size("n_positions"),
            positions="learned",
            norm="layer",
            feed_forward="gelu" if kind == "gelu" else "gelu-tanh",
            biased=("query", "key", "value", "output", "up", "down"),
            epsilon=self.number(self.held, "layer_norm_epsilon", 1e-5),
        )


def tensors_of(folder: Path, weights: str = _WEIGHTS) -> dict[str, Any]:
    """Return what reads each tensor of a folder, by its name."""
    library, index = _safetensors(), folder / f"{weights}.index.json"
    if index.is_file():
        listed = json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise InvalidInputError(f"{index} is damaged: it has no weight_map.")
        files = sorted({str(name) for name in listed.values()})
    else:
        files = [weights]
    found = {}
    for name in files:
        path = folder / name
        if Path(name).name != name or path.suffix != ".safetensors":
            raise InvalidInputError(
                f"{index} names {name!r:.60}: only files .safetensors beside it are "
                "read, since others may hold code."
            )
        if not path.is_file():
            raise _missing(folder, name)
        try:
            opened = library(path, framework="numpy")
            found |= dict.fromkeys(opened.keys(), opened)
        except Exception as error:  # of the library's own kind
            raise InvalidInputError(f"{path} is damaged: {error}.") from None
    return found


def _missing(folder: Path, name: str) -> InvalidInputError:
    other = [one.name for one in folder.glob("*") if one.suffix in (".bin", ".pt")]
    if other and name == _WEIGHTS:
        return InvalidInputError(
            f"{folder} holds {min(other)} and no {_WEIGHTS}: such files may hold code "
            "and are not read. Save the model again with safe_serialization=True."
        )
    return InvalidInputError(f"{folder / name} is missing: part of the weights.")


class _Reader:
    """Reads the tensors of a folder as arrays of one type, each once."""

    def __init__(
        self,
        place: Path,
        tensors: dict[str, Any],
        names: Names,
        made: Architecture,
        kind: Any,
    ) -> None:
        # Hub files of GPT-2 leave the prefix out.
        bare = any(name.startswith(f"{names.block}.") for name in tensors)
        self._prefix = "" if bare else names.prefix
        self._place, self._tensors, self._names = place, dict(tensors), names
        self._made, self._kind, self._read = made, kind, set()

    def _array(self, name: str, *shape: int) -> np.ndarray:
        if name not in self._tensors:
            raise InvalidInputError(f"{self._place} has no tensor {name}.")
        part = self._tensors[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise InvalidInputError(
                f"{self._place}: {name} has the shape {tuple(part.get_shape())}, but "
                f"{_CONFIG} makes it {shape}."
            )
        if part.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            raise InvalidInputError(
                f"{self._place}: {name} holds {part.get_dtype()}, not plain floats."
            )
        self._read.add(name)
        return np.asarray(self._tensors[name].get_tensor(name)).astype(self._kind)

    def _own(self, name: str, *shape: int) -> np.ndarray:
        return self._array(self._prefix + name, *shape)

    def _each_block(self, name: str, *shape: int) -> np.ndarray:
        whole = np.empty((self._made.blocks, *shape), self._kind)
        for n in range(self._made.blocks):
            whole[n] = self._own(f"{self._names.block}.{n}.{name}", *shape)
        return whole

    def _norm(self, name: str, width: int, *, stacked: bool = True) -> Norm:
        read = self._each_block if stacked else self._own
        weight = read(f"{name}.weight", width)
        if self._made.norm == "rms":
            return Norm(jnp.asarray(weight))
        return Norm(jnp.asarray(weight), jnp.asarray(read(f"{name}.bias", width)))

    def _norms(self) -> dict[str, Norm]:
        wide = {"attention": self._made.width, "feed_forward": self._made.width}
        if self._made.head_norm:
            wide |= dict.fromkeys(("query", "key"), self._made.head_width)
        return {
            name: self._norm(self._names.norms[name], width)
            for name, width in wide.items()
        }

    def _whole(self, weights: Any, biases: Any, positions: Any, head: Any):
        names, made = self._names, self._made
        shape = (made.vocabulary, made.width)
        return Transformer(
            jnp.asarray(self._own(f"{names.embeddings}.weight", *shape)),
            positions,
            {name: jnp.asarray(one) for name, one in weights.items()},
            {name: jnp.asarray(one) for name, one in biases.items()},
            self._norms(),
            self._norm(names.last_norm, made.width, stacked=False),
            head,
            made,
        )

    def llama(self) -> Transformer:
        """Return the transformer of a folder of the Llama family."""
        made, names = self._made, self._names.projections
        shapes = projection_shapes(made)
        weights = {
            name: self._each_block(f"{names[name]}.weight", *shape)
            for name, shape in shapes.items()
        }
        biases = {
            name: self._each_block(f"{names[name]}.bias", shapes[name][0])
            for name in made.biased
        }
        head = None
        if not made.tied:
            head = jnp.asarray(
                self._array("lm_head.weight", made.vocabulary, made.width)
            )
        return self._whole(weights, biases, None, head)

    def gpt2(self) -> Transformer:
        """Return the transformer of a folder of GPT-2, whose matrices lie across."""
        made, names = self._made, self._names.projections
        shapes, width = projection_shapes(made), self._made.width
        fused = self._each_block(f"{_FUSED}.weight", width, 3 * width)
        parts = np.split(np.swapaxes(fused, 1, 2), 3, axis=1)
        weights = dict(zip(("query", "key", "value"), parts, strict=True))
        parts = np.split(self._each_block(f"{_FUSED}.bias", 3 * width), 3, axis=1)
        biases = dict(zip(("query", "key", "value"), parts, strict=True))
        for name, own in names.items():
            outputs, inputs = shapes[name]
            across = self._each_block(f"{own}.weight", inputs, outputs)
            weights[name] = np.swapaxes(across, 1, 2)
            biases[name] = self._each_block(f"{own}.bias", outputs)
        places = jnp.asarray(self._own("wpe.weight", made.longest, width))
        return self._whole(weights, biases, places, None)

    def check_all_read(self) -> None:
        """Raise if the folder has tensors that nothing was made of."""
        for name in self._left_over():
            raise InvalidInputError(
                f"{self._place} has a tensor {name}, of which {_CONFIG} says nothing: "
                "it is of another architecture."
            )

    def _left_over(self) -> Iterator[str]:
        for name in sorted(self._tensors):
            tied = name == "lm_head.weight" and self._made.tied
            if name not in self._read and not tied and not name.endswith(_IGNORED):
                yield name


def _safetensors() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise FedbilevelError(
            "checkpoints are read by the package safetensors: install fedbilevel[text]."
        ) from None
    return safe_open
