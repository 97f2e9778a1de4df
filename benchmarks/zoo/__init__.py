"""Bilevel problems with losses of their own, as a user writes them.

    python -m benchmarks.zoo --list
    python -m benchmarks.zoo --jobs 16 --out zoo.jsonl
    python -m benchmarks.zoo --problem fednest --partition label --seeds 1 --no-grid

Every problem runs with the default recipe from several seeds, on clients that are alike
(iid), that differ in labels, and of unequal sizes. A grid of plain step sizes with the
same number of rounds is the tuned reference.
"""

from benchmarks.zoo import classification as classification
from benchmarks.zoo import networks as networks
from benchmarks.zoo import regression as regression
