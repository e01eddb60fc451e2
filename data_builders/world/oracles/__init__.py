"""What the oracle replies to the calls of a system, a module each with `REPLIES`: functions by the call's role.

The role `ircot.think` is `REPLIES["think"]` of `ircot.py`: `(oracle, messages) -> reply`.
"""
