r"""EF-SOBA: SOBA on clients that send a part of each direction, and remember the rest.

With D_k = (D_x, D_y, D_z) of SOBA (`fedbilevel.algorithms.soba`) on client k, one
sample for each level, and C a compression of each block:

    client k:  c_k = C(e_k + D_k(w; s)),   e_k <- e_k + D_k(w; s) - c_k,   e_k = 0 first
    server:    w <- w - lr a_t mean_k c_k            at every iteration (p = 1)

What was not sent is added to what is sent next (error feedback), so that nothing is
lost, only late. C is the channel's (`--compress`): by its name the method comes with
the largest tenth of each block, `topk:0.1`. With `quantize:8`, which is unbiased and
needs no memory, it is C-SOBA; without compression it is SOBA on clients, averaged at
every iteration, which is right where they differ.

Exchanges an iteration: 1, with dx + 2 dy floats down; up a tenth of that, and as many
places.

Reference: He et al., arXiv 2405.18858 (ICML 2024).
Deviations: the listing is a reconstruction, the paper's abstract was read, not its
body. The variants with momentum and with many steps of compression are left out.
"""

from fedbilevel.algorithms._preset import Preset
from fedbilevel.algorithms.soba import SOBA

__all__ = ["EFSOBA"]

EFSOBA = Preset(
    SOBA,
    summary="SOBA on clients, with compressed directions and error feedback.",
    reference="He et al. 2024, arXiv 2405.18858",
    provenance="abstract read; listing reconstructed, unverified",
    letters={"lr_x": "lr_x", "lr_y": "lr_y", "lr_z": "lr_z"},
    channel={"compress": "topk:0.1"},
)
