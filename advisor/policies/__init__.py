"""Policies: pure functions and orders over the folded state. They read no clock and do no I/O."""
