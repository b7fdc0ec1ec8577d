"""Engines that keep their blocks on our volumes: one file an engine, and what they share."""
