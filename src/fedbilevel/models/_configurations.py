"""The architecture of a checkpoint, by its `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.errors import InvalidInputError
from fedbilevel.models.transformer import Architecture, RotaryScaling

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
_LONGEST = 2**24  # bytes of JSON
_LARGEST = 2**20  # of any size in a config


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
