"""Volumes of KV blocks: the only room that writes to them. Knows event_plane alone; `port` is what others call."""
