"""Stores and removes a minute and tier, and the busiest prefixes: `python examples/read_recording_polars.py FILE`."""

import sys

import polars as pl

if len(sys.argv) != 2:
    sys.exit("use: python examples/read_recording_polars.py FILE.parquet")

told = pl.from_epoch("timestamp_us", time_unit="us").dt.replace_time_zone("UTC")
events = (
    pl.scan_parquet(sys.argv[1])
    .filter(pl.col("event_type").cast(pl.String) != "none")
    .with_columns(
        type=pl.col("event_type").cast(pl.String),
        minute=pl.coalesce("received_at", told).dt.truncate("1m").dt.strftime("%H:%M"),
    )
)

moved = events.filter(pl.col("type").is_in(["store", "remove"]))
a_minute = moved.group_by("minute", "tier").agg(
    stores=(pl.col("type") == "store").sum(), removes=(pl.col("type") == "remove").sum()
)
print(a_minute.sort("minute", "tier").collect().write_csv(separator="\t"))

# Engines do not name a block's prefix; the first block of a sequence is its own.
at_root = pl.when(pl.col("parent_hash_lo") == 0).then("sequence_hash_lo").otherwise(0)
prefix = pl.when(pl.col("prefix_hash_lo") != 0).then("prefix_hash_lo").otherwise(at_root).alias("prefix")
busiest = events.filter(pl.col("type") == "store").group_by(prefix).agg(stores=pl.len()).filter(pl.col("prefix") != 0)
print(busiest.sort(["stores", "prefix"], descending=[True, False]).head(5).collect().write_csv(separator="\t"))
