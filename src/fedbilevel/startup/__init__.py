"""Code for faster starts: nothing here changes a number.

A start is `fedbilevel run TASK --rounds 1`, in processor seconds; it is cold without
programs on disk and warm with them. `benchmarks/README.md` says how each was measured.

- `compiled_programs` keeps what was compiled: three quarters of a start, which takes
  10.8 s cold and 2.6 s warm on `two-client`. It also optimizes less: 5 % of a cold
  start by the level of LLVM, and 10 % by what runs only once.
- `stored_traces` keeps what was traced: 30 % of a warm start. `identity` describes what
is traced and `own_process` notes the running program; it needs both.
- `own_process` also looks for garbage seldom until the first round: 6 to 8 % of a warm
  start.
- `random_bits` draws by one kernel: 18 to 40 % of a round with small batches, and 8 to
  29 % of the cold start of such a run.

A gain below 5 % of a start does not belong here.
"""
