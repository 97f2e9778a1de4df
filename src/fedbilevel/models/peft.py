"""Adapters as the library PEFT writes them: a JSON file and one of safetensors.

GPT-2 has queries, keys and values in one matrix. Its adapter is one, whose rank is the
sum of theirs: B is made of blocks, and the product is the same. Reading splits it
again, and it has the rank of the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedbilevel.errors import InvalidInputError, needed
from fedbilevel.models.adapters import Adapter, Adapters
from fedbilevel.models.checkpoints import json_object, names_of, tensors_of
from fedbilevel.models.transformer import Architecture, projection_shapes

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KNOWN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False}


def packed_adapters(adapters: Adapters, family: str, base: str) -> dict[str, bytes]:
    """Return the contents of the two files; `base` says whose adapters they are."""
    sentence = "adapters are kept by safetensors: install fedbilevel[text]."
    library = needed("safetensors.numpy", sentence)
    pairs = _pairs(adapters, family)
    names, arrays = names_of(family), {}
    for target, (a, b, _) in pairs.items():
        for number in range(len(a)):
            where = f"{_PREFIX}{names.prefix}{names.block}.{number}.{target}"
            arrays[f"{where}.lora_A.weight"] = np.ascontiguousarray(a[number])
            arrays[f"{where}.lora_B.weight"] = np.ascontiguousarray(b[number])
    text = json.dumps(_config(pairs, family, base), indent=2) + "\n"
    return {_CONFIG: text.encode(), _WEIGHTS: library.save(arrays, {"format": "pt"})}


_Pair = tuple[np.ndarray, np.ndarray, float]


def _pairs(adapters: Mapping[str, Any], family: str) -> dict[str, _Pair]:
    """Return A, B and the scale of every matrix, by what the family calls it."""
    pairs: dict[str, _Pair] = {}
    for matrix, parts in names_of(family).matrices.items():
        held = [name for name in parts if name in adapters]
        if not held:
            continue
        a = [np.asarray(adapters[name].a, np.float32) for name in held]
        blocks, outputs, rank = adapters[held[0]].b.shape
        b = np.zeros((blocks, len(parts) * outputs, len(held) * rank), np.float32)
        for place, name in enumerate(held):
            row, column = parts.index(name) * outputs, place * rank
            b[:, row : row + outputs, column : column + rank] = adapters[name].b
        pairs[matrix] = (np.concatenate(a, axis=1), b, adapters[held[0]].scale)
    return pairs


def _config(pairs: Mapping[str, _Pair], family: str, base: str) -> dict[str, Any]:
    ranks = {target: a.shape[1] for target, (a, _, _) in pairs.items()}
    alphas = {target: pairs[target][2] * rank for target, rank in ranks.items()}
    usual = min(ranks, key=lambda target: ranks[target])
    other = [target for target in ranks if ranks[target] != ranks[usual]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": ranks[usual],
        "lora_alpha": alphas[usual],
        "rank_pattern": {target: ranks[target] for target in other},
        "alpha_pattern": {target: alphas[target] for target in other},
        "target_modules": sorted(pairs),
        "fan_in_fan_out": family == "gpt2",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read_adapters(
    folder: Path | str, made: Architecture, family: str
) -> dict[str, Adapter]:
    """Read a folder of PEFT's as adapters of a transformer."""
    place = Path(folder)
    config = json_object(place / _CONFIG)
    for name, value in _KNOWN.items():
        if config.get(name, value) != value:
            raise InvalidInputError(
                f"{place / _CONFIG}: {name} is {config[name]!r:.40}, and only "
                f"{value!r} is known."
            )
    tensors = tensors_of(place, _WEIGHTS)
    names, shapes = names_of(family), projection_shapes(made)
    found: dict[str, Adapter] = {}
    where = f"{_PREFIX}{names.prefix}{names.block}"
    for target, parts in names.matrices.items():
        keys = [f"{where}.{n}.{target}" for n in range(made.blocks)]
        if f"{keys[0]}.lora_A.weight" not in tensors:
            continue
        outputs = sum(shapes[name][0] for name in parts)
        a, b = _stacked(place, tensors, keys, outputs, shapes[parts[0]][1])
        scale = _scale(place, config, target, a.shape[1])
        for name, own in zip(parts, np.split(b, len(parts), axis=1), strict=True):
            found[name] = Adapter(jnp.asarray(a), jnp.asarray(own), scale)
    if tensors or not found:
        odd = min(tensors, default="no adapter of this family")
        raise InvalidInputError(
            f"{place} holds {odd}, which belongs to no {family} of {made.blocks} "
            "blocks."
        )
    return found


def _scale(place: Path, config: Mapping[str, Any], target: str, rank: int) -> float:
    usual, own = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    alpha: Any = own.get(target, usual) if isinstance(own, dict) else None
    if type(alpha) not in (int, float):
        raise InvalidInputError(f"{place / _CONFIG}: lora_alpha is no number.")
    return float(alpha) / rank


def _stacked(
    place: Path, tensors: dict[str, Any], keys: list[str], outputs: int, inputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of all blocks, which are taken out of the tensors."""
    sides: dict[str, list[np.ndarray]] = {"A": [], "B": []}
    kind, rank = jnp.zeros((), float).dtype, 0
    for key in keys:
        for side, held in sides.items():
            name = f"{key}.lora_{side}.weight"
            if name not in tensors:
                raise InvalidInputError(f"{place} has no tensor {name}.")
            array = np.asarray(tensors.pop(name).get_tensor(name)).astype(kind)
            rank = rank or len(array)
            wanted = (rank, inputs) if side == "A" else (outputs, rank)
            if array.shape != wanted:
                raise InvalidInputError(
                    f"{place}: {name} has the shape {array.shape}, not {wanted}."
                )
            held.append(array)
    return np.stack(sides["A"]), np.stack(sides["B"])
