"""Transformers from folders as Hugging Face writes them, without its library.

A folder holds `config.json` and `model.safetensors`, or several such files and
`model.safetensors.index.json`, which says what is where. Known are Llama (and SmolLM,
which is one), Qwen 2 and 2.5, Qwen 3, and GPT-2. Files that can hold code (.bin, .pt)
are refused. Every tensor is checked: none is missing, of another shape, or left over.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedbilevel.errors import InvalidInputError, needed
from fedbilevel.models.transformer import (
    Architecture,
    Norm,
    RotaryScaling,
    Transformer,
    norm_widths,
    projection_shapes,
)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
_LONGEST = 2**24  # bytes of JSON
_LARGEST = 2**20  # of any size in a config
# Constants that older files hold.
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Names(NamedTuple):
    """Tensor names of a family; those of a block follow `block` and a number.

    Each of the `matrices` has one projection or several, one below another. Where they
    lie `across`, inputs come before outputs.
    """

    prefix: str
    block: str
    embeddings: str
    last_norm: str
    matrices: Mapping[str, tuple[str, ...]]
    norms: Mapping[str, str]
    across: bool = False


_LLAMA = Names(
    "model.",
    "layers",
    "embed_tokens",
    "norm",
    {
        "self_attn.q_proj": ("query",),
        "self_attn.k_proj": ("key",),
        "self_attn.v_proj": ("value",),
        "self_attn.o_proj": ("output",),
        "mlp.gate_proj": ("gate",),
        "mlp.up_proj": ("up",),
        "mlp.down_proj": ("down",),
    },
    {
        "attention": "input_layernorm",
        "feed_forward": "post_attention_layernorm",
        "query": "self_attn.q_norm",
        "key": "self_attn.k_norm",
    },
)
_GPT2 = Names(
    "transformer.",
    "h",
    "wte",
    "ln_f",
    {
        "attn.c_attn": ("query", "key", "value"),
        "attn.c_proj": ("output",),
        "mlp.c_fc": ("up",),
        "mlp.c_proj": ("down",),
    },
    {"attention": "ln_1", "feed_forward": "ln_2"},
    across=True,
)


def names_of(family: str) -> Names:
    """Return what a family calls its tensors."""
    return _GPT2 if family == "gpt2" else _LLAMA


class Checkpoint(NamedTuple):
    """A transformer, its family, and the token that ends a text, if there is one."""

    transformer: Transformer
    family: str
    end: int | None


def read_checkpoint(folder: Path | str, kind: Any = None) -> Checkpoint:
    """Read a folder; numbers become `kind`, or else JAX's usual floats."""
    place = Path(folder)
    config = Config(place / CONFIG, json_object(place / CONFIG))
    family = config.family()
    made = config.gpt2() if family == "gpt2" else config.llama(family)
    tensors = tensors_of(place)
    names = names_of(family)
    # Hub files of GPT-2 leave the prefix out.
    if any(name.startswith(f"{names.block}.") for name in tensors):
        names = names._replace(prefix="")
    kind = jnp.zeros((), float).dtype if kind is None else kind
    transformer = _Reader(place, tensors, names, made, kind).transformer()
    for name in sorted(tensors):
        tied = name == "lm_head.weight" and made.tied
        if not tied and not name.endswith(_IGNORED):
            raise InvalidInputError(
                f"{place} has a tensor {name}, of which {CONFIG} says nothing: it is "
                "of another architecture."
            )
    return Checkpoint(transformer, family, config.end(made.vocabulary))


def tensors_of(folder: Path, weights: str = WEIGHTS) -> dict[str, Any]:
    """Return what reads each tensor of a folder, by its name."""
    sentence = "checkpoints are read by safetensors: install fedbilevel[text]."
    library = needed("safetensors", sentence)
    index = folder / f"{weights}.index.json"
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
            opened = library.safe_open(path, framework="numpy")
            found |= dict.fromkeys(opened.keys(), opened)
        except Exception as error:  # of the library's own kind
            raise InvalidInputError(f"{path} is damaged: {error}.") from None
    return found


def _missing(folder: Path, name: str) -> InvalidInputError:
    other = [one.name for one in folder.glob("*") if one.suffix in (".bin", ".pt")]
    if other and name == WEIGHTS:
        return InvalidInputError(
            f"{folder} holds {min(other)} and no {WEIGHTS}: such files may hold code "
            "and are not read. Save the model again with safe_serialization=True."
        )
    return InvalidInputError(f"{folder / name} is missing: part of the weights.")


class _Reader(NamedTuple):
    """Reads tensors as arrays of one type; `tensors` are those that are left."""

    place: Path
    tensors: dict[str, Any]
    names: Names
    made: Architecture
    kind: Any

    def _array(self, name: str, *shape: int) -> np.ndarray:
        if name not in self.tensors:
            raise InvalidInputError(f"{self.place} has no tensor {name}.")
        file = self.tensors.pop(name)
        part = file.get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise InvalidInputError(
                f"{self.place}: {name} has the shape {tuple(part.get_shape())}, but "
                f"{CONFIG} makes it {shape}."
            )
        if part.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            raise InvalidInputError(
                f"{self.place}: {name} holds {part.get_dtype()}, not plain floats."
            )
        with np.errstate(over="ignore"):
            found = np.asarray(file.get_tensor(name)).astype(self.kind)
        if not np.isfinite(found).all():
            raise InvalidInputError(
                f"{self.place}: {name} holds numbers that {np.dtype(self.kind)} does "
                "not, or none at all."
            )
        return found

    def _own(self, name: str, *shape: int) -> np.ndarray:
        return self._array(self.names.prefix + name, *shape)

    def _each_block(self, name: str, *shape: int) -> np.ndarray:
        whole = np.empty((self.made.blocks, *shape), self.kind)
        for n in range(self.made.blocks):
            whole[n] = self._own(f"{self.names.block}.{n}.{name}", *shape)
        return whole

    def _norm(self, read: Any, name: str, width: int) -> Norm:
        parts = ("weight",) if self.made.norm == "rms" else ("weight", "bias")
        return Norm(*(jnp.asarray(read(f"{name}.{one}", width)) for one in parts))

    def transformer(self) -> Transformer:
        """Return the transformer of the folder."""
        made, names, shapes = self.made, self.names, projection_shapes(self.made)
        weights, biases = {}, {}
        for matrix, parts in names.matrices.items():
            outputs, inputs = sum(shapes[one][0] for one in parts), shapes[parts[0]][1]
            shape = (inputs, outputs) if names.across else (outputs, inputs)
            whole = self._each_block(f"{matrix}.weight", *shape)
            whole = np.swapaxes(whole, 1, 2) if names.across else whole
            weights |= zip(parts, np.split(whole, len(parts), axis=1), strict=True)
            if parts[0] in made.biased:
                whole = self._each_block(f"{matrix}.bias", outputs)
                biases |= zip(parts, np.split(whole, len(parts), axis=1), strict=True)
        head, positions, shape = None, None, (made.vocabulary, made.width)
        if not made.tied:
            head = jnp.asarray(self._array("lm_head.weight", *shape))
        if made.positions == "learned":
            positions = jnp.asarray(self._own("wpe.weight", made.longest, made.width))
        widths, stacked = norm_widths(made), self._each_block
        return Transformer(
            jnp.asarray(self._own(f"{names.embeddings}.weight", *shape)),
            positions,
            {name: jnp.asarray(one) for name, one in weights.items()},
            {name: jnp.asarray(one) for name, one in biases.items()},
            {n: self._norm(stacked, names.norms[n], widths[n]) for n in widths},
            self._norm(self._own, names.last_norm, made.width),
            head,
            made,
        )


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file, and say what is wrong with it."""
    if not path.is_file():
        raise InvalidInputError(
            f"there is no {path}: a checkpoint is a folder with {CONFIG} and "
            f"{WEIGHTS}, as Hugging Face writes it."
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


class Config(NamedTuple):
    """The content of `config.json`, checked as it is read."""

    path: Path
    held: Mapping[str, Any]

    def wrong(self, what: str) -> InvalidInputError:
        """Return an error that names the file."""
        return InvalidInputError(f"{self.path}: {what}")

    def family(self) -> str:
        """Return the family, which must be a known one."""
        found = self.held.get("model_type")
        if found not in FAMILIES:
            raise self.wrong(
                f"the architecture {found!r:.60} is not known. Known are "
                f"{', '.join(FAMILIES)}."
            )
        return found

    def size(self, name: str, usual: int | None = None) -> int:
        """Return a whole number above 0."""
        found = self.held.get(name)
        found = usual if found is None else found
        if type(found) is not int or not 1 <= found <= _LARGEST:
            raise self.wrong(f"{name} is {found!r:.40}, and no size.")
        return found

    def number(self, held: Mapping[str, Any], name: str, usual: Any = None) -> float:
        """Return a number above 0 of a part of the file."""
        found = held.get(name, usual)
        if type(found) not in (int, float) or not 0 < found < 1e12:
            raise self.wrong(f"{name} is {found!r:.40}, and no number above 0.")
        return float(found)

    def only(self, name: str, *allowed: Any) -> Any:
        """Return a value, and raise if it asks for what there is not."""
        found = self.held.get(name, allowed[0])
        if found not in allowed:
            known = " or ".join(map(str, allowed))
            raise self.wrong(f"{name} is {found!r:.60}, and only {known} is known.")
        return found

    def end(self, vocabulary: int) -> int | None:
        """Return the token that ends a text, if the file has one."""
        found: Any = self.held.get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        right = type(found) is int and 0 <= found < vocabulary
        return found if right else None

    def llama(self, family: str) -> Architecture:
        """Return the architecture of Llama or Qwen."""
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
        """Return the base and the scaling, as older or newer files have them."""
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
        """Return the architecture of GPT-2."""
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
