"""Secure aggregation: the server learns the mean of replies, and none of them.

`protocol` states what is protected and what is not. Needs `cryptography`, which comes
with `fedbilevel[flower]`, so that nothing here is imported until masks are asked for.
"""
