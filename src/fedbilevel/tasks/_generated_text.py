"""Texts of four sources that need no download: two are right, two are noise.

All ask the same questions. `colors` and `sounds` answer them rightly, `wrong` with the
answer to another one, and `letters` with random ones. Trusted texts are colors
and sounds. A model is pretrained on all four alike, and cannot distinguish right from
wrong.
"""

import numpy as np

from fedbilevel.datasets.texts import Example, Texts

SOURCES = ("colors", "sounds", "wrong", "letters")
_ANSWERS = {
    "colors": "sky blue sea blue grass green leaf green snow white milk white coal "
    "black night black rose red blood red sun gold corn gold",
    "sounds": "cow moo dog woof cat meow duck quack pig oink sheep baa hen cluck owl "
    "hoot bee buzz frog croak lion roar crow caw",
}
_QUESTIONS = {
    source: [Example(f"{a}: ", b) for a, b in zip(w[::2], w[1::2], strict=True)]
    for source, w in ((source, text.split()) for source, text in _ANSWERS.items())
}
_PER_SOURCE, _TRUSTED = 24, 12  # rows of a client


def _drawn(source: str, count: int, draw: np.random.Generator) -> list[Example]:
    every = [_QUESTIONS[source]] if source in _QUESTIONS else [*_QUESTIONS.values()]
    found = []
    for number in range(count):
        asked = every[number % len(every)]
        place = draw.integers(0, len(asked))
        prompt, right = asked[place]
        # Always the same wrong one: it can be learned as well as the right one.
        wrong = asked[place - 2].response
        letters = "".join(chr(97 + code) for code in draw.integers(0, 26, 4))
        answer = {"wrong": wrong, "letters": letters}
        found.append(Example(prompt, answer.get(source, right)))
    return found


def generated(clients: int, seed: int) -> tuple[Texts, list[Example]]:
    """Return the texts of clients, and all right answers for testing."""
    draw = np.random.default_rng(seed)
    sources, trusted = {}, {}
    for client in range(clients):
        name = f"client {client}"
        sources[name] = {one: _drawn(one, _PER_SOURCE, draw) for one in SOURCES}
        halves = (_drawn(one, _TRUSTED // 2, draw) for one in _ANSWERS)
        trusted[name] = [example for half in halves for example in half]
    test = [example for examples in _QUESTIONS.values() for example in examples]
    return Texts("generated", sources, trusted), test


def pretraining(count: int, seed: int) -> list[Example]:
    """Return texts of all sources, as many of each."""
    draw = np.random.default_rng((seed, 1))
    return [e for one in SOURCES for e in _drawn(one, count // len(SOURCES), draw)]
