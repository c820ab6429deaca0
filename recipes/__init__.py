"""Experiments: short scripts, run with `accelerate launch recipes/NAME.py`; nothing imports them."""
