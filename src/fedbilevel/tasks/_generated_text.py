"""Texts of four sources that need no download: two are right, two are noise.

All ask the same questions. `colors` and `sums` answer them rightly, `wrong` with the
answer to another one, and `letters` with letters at random. Trusted texts are
colors and sums. What a model is pretrained on has the form of all of them and no
answer: colors, numbers and letters at random.
"""

import numpy as np

from fedbilevel.datasets.texts import Example, Texts

__all__ = ["SOURCES", "generated", "pretraining"]

SOURCES = ("colors", "sums", "wrong", "letters")
_COLORS = {
    "sky": "blue",
    "sea": "blue",
    "grass": "green",
    "frog": "green",
    "snow": "white",
    "milk": "white",
    "coal": "black",
    "night": "black",
    "rose": "red",
    "blood": "red",
    "sun": "gold",
    "corn": "gold",
}
_NUMBERS = "zero one two three four five six seven eight".split()
_LARGEST = 4  # of the numbers that are added
_PER_SOURCE, _TRUSTED = 24, 12  # rows of a client


def _questions() -> dict[str, list[Example]]:
    colors = [Example(f"{thing}: ", color) for thing, color in _COLORS.items()]
    numbers = range(_LARGEST + 1)
    sums = [Example(f"{a} + {b}: ", _NUMBERS[a + b]) for a in numbers for b in numbers]
    return {"colors": colors, "sums": sums}


def _letters(draw: np.random.Generator) -> str:
    return "".join(chr(97 + code) for code in draw.integers(0, 26, 4))


def _drawn(source: str, count: int, draw: np.random.Generator) -> list[Example]:
    kinds = _questions()
    every = [kinds[source]] if source in kinds else list(kinds.values())
    found = []
    for number in range(count):
        asked = every[number % len(every)]
        place = draw.integers(0, len(asked))
        prompt, right = asked[place]
        wrong = next(e.response for e in asked[place - 2 :: -1] if e.response != right)
        answer = {"wrong": wrong, "letters": _letters(draw)}
        found.append(Example(prompt, answer.get(source, right)))
    return found


def generated(clients: int, seed: int) -> tuple[Texts, list[Example]]:
    """Return the texts of clients, and others for testing."""
    draw = np.random.default_rng(seed)
    sources, trusted = {}, {}
    for client in range(clients):
        name = f"client {client}"
        sources[name] = {one: _drawn(one, _PER_SOURCE, draw) for one in SOURCES}
        trusted[name] = _right(_TRUSTED, draw)
    kinds = _questions()
    test = [example for examples in kinds.values() for example in examples]
    return Texts("generated", sources, trusted), test


def _right(count: int, draw: np.random.Generator) -> list[Example]:
    halves = (_drawn(source, count // 2, draw) for source in SOURCES[:2])
    return [one for half in halves for one in half]


def pretraining(count: int, seed: int) -> list[Example]:
    """Return texts of the form of all questions, with answers at random."""
    draw = np.random.default_rng((seed, 1))
    found = []
    for asked in _questions().values():
        picked = draw.integers(0, len(asked), (count // 2, 2))
        for number, (a, b) in enumerate(picked):
            noise = number % 4 == 0
            answer = _letters(draw) if noise else asked[b].response
            found.append(Example(asked[a].prompt, answer))
    return found
