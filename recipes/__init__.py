"""Experiments: short scripts, run by `accelerate launch recipes/NAME.py`. Nothing imports them."""
