"""Transformers from folders as Hugging Face writes them, without its library.

A folder holds `config.json` and `model.safetensors`, or several such files and
`model.safetensors.index.json`, which says what is where. Known are Llama (and SmolLM,
which is one), Qwen 2 and 2.5, Qwen 3, and GPT-2. Files that can hold code (.bin, .pt)
are refused. Every tensor is checked: none is missing, of another shape, or left over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedbilevel.errors import InvalidInputError, needed
from fedbilevel.models._configurations import CONFIG, WEIGHTS, Config, json_object
from fedbilevel.models.transformer import (
    Architecture,
    Norm,
    Transformer,
    projection_shapes,
)

# Constants that older files hold.
_IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Names(NamedTuple):
    """Tensor names of a family; those of a block follow `block` and a number."""

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
FUSED = "attn.c_attn"


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
    kind = jnp.zeros((), float).dtype if kind is None else kind
    reader = _Reader(place, tensors, names_of(family), made, kind)
    transformer = reader.gpt2() if family == "gpt2" else reader.llama()
    reader.check_all_read()
    return Checkpoint(transformer, family, config.end(made.vocabulary))


def tensors_of(folder: Path, weights: str = WEIGHTS) -> dict[str, Any]:
    """Return what reads each tensor of a folder, by its name."""
    library = needed(
        "safetensors", "checkpoints are read by safetensors: install fedbilevel[text]."
    )
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
                f"{CONFIG} makes it {shape}."
            )
        if part.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            raise InvalidInputError(
                f"{self._place}: {name} holds {part.get_dtype()}, not plain floats."
            )
        self._read.add(name)
        with np.errstate(over="ignore"):
            found = np.asarray(self._tensors[name].get_tensor(name)).astype(self._kind)
        if not np.isfinite(found).all():
            raise InvalidInputError(
                f"{self._place}: {name} holds numbers that {np.dtype(self._kind)} does "
                "not, or none at all."
            )
        return found

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

    def _whole(self, weights: Any, biases: Any, positions: Any, head: Any):
        names, made = self._names, self._made
        shape = (made.vocabulary, made.width)
        wide = dict.fromkeys(("attention", "feed_forward"), made.width)
        if made.head_norm:
            wide |= dict.fromkeys(("query", "key"), made.head_width)
        return Transformer(
            jnp.asarray(self._own(f"{names.embeddings}.weight", *shape)),
            positions,
            {name: jnp.asarray(one) for name, one in weights.items()},
            {name: jnp.asarray(one) for name, one in biases.items()},
            {name: self._norm(names.norms[name], n) for name, n in wide.items()},
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
        head, shape = None, (made.vocabulary, made.width)
        if not made.tied:
            head = jnp.asarray(self._array("lm_head.weight", *shape))
        return self._whole(weights, biases, None, head)

    def gpt2(self) -> Transformer:
        """Return the transformer of a folder of GPT-2, whose matrices lie across."""
        made, names = self._made, self._names.projections
        shapes, width = projection_shapes(made), self._made.width
        fused = self._each_block(f"{FUSED}.weight", width, 3 * width)
        parts = np.split(np.swapaxes(fused, 1, 2), 3, axis=1)
        three = ["query", "key", "value"]
        weights = dict(zip(three, parts, strict=True))
        parts = np.split(self._each_block(f"{FUSED}.bias", 3 * width), 3, axis=1)
        biases = dict(zip(three, parts, strict=True))
        for name, own in names.items():
            outputs, inputs = shapes[name]
            across = self._each_block(f"{own}.weight", inputs, outputs)
            weights[name] = np.swapaxes(across, 1, 2)
            biases[name] = self._each_block(f"{own}.bias", outputs)
        places = jnp.asarray(self._own("wpe.weight", made.longest, width))
        return self._whole(weights, biases, places, None)

    def check_all_read(self) -> None:
        """Raise if the folder has tensors that nothing was made of."""
        for name in sorted(set(self._tensors) - self._read):
            tied = name == "lm_head.weight" and self._made.tied
            if not tied and not name.endswith(_IGNORED):
                raise InvalidInputError(
                    f"{self._place} has a tensor {name}, of which {CONFIG} says "
                    "nothing: it is of another architecture."
                )
