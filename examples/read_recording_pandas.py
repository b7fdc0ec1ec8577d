"""Stores and removes a minute and tier, and the busiest prefixes: `python examples/read_recording_pandas.py FILE`."""

import sys

import pandas as pd

if len(sys.argv) != 2:
    sys.exit("use: python examples/read_recording_pandas.py FILE.parquet")

columns = ["received_at", "timestamp_us", "event_type", "tier", "prefix_hash_lo", "sequence_hash_lo", "parent_hash_lo"]
events = pd.read_parquet(sys.argv[1], columns=columns)
events = events[events.event_type != "none"]

told = pd.to_datetime(events.timestamp_us, unit="us", utc=True)
events["minute"] = events.received_at.fillna(told).dt.floor("min").dt.strftime("%H:%M")
moved = events[events.event_type.isin(["store", "remove"])]
print(moved.groupby(["minute", "tier", "event_type"], observed=True).size().unstack(fill_value=0).to_string())

stores = events[events.event_type == "store"]
at_root = stores.sequence_hash_lo.where(stores.parent_hash_lo == 0, 0)
prefix = stores.prefix_hash_lo.where(stores.prefix_hash_lo != 0, at_root)
print(prefix[prefix != 0].value_counts().head(5).rename_axis("prefix").rename("stores").to_string())
