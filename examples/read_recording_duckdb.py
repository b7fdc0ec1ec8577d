"""Stores and removes a minute and tier, and the busiest prefixes: `python examples/read_recording_duckdb.py FILE`."""

import sys

import duckdb

if len(sys.argv) != 2:
    sys.exit("use: python examples/read_recording_duckdb.py FILE.parquet")

duckdb.sql("set timezone = 'UTC'")
recording = duckdb.read_parquet(sys.argv[1])
events = duckdb.sql(
    """select *, strftime(coalesce(received_at, make_timestamptz(timestamp_us::bigint)), '%H:%M') as minute
    from recording where event_type <> 'none'"""
)

a_minute = duckdb.sql(
    """select minute, tier, count(*) filter (event_type = 'store') as stores,
    count(*) filter (event_type = 'remove') as removes
    from events where event_type in ('store', 'remove') group by all order by all"""
)
print("minute", "tier", "stores", "removes", sep="\t")
for row in a_minute.fetchall():
    print(*row, sep="\t")

# Engines do not name a block's prefix; the first block of a sequence is its own.
busiest = duckdb.sql(
    """select case when prefix_hash_lo <> 0 then prefix_hash_lo when parent_hash_lo = 0 then sequence_hash_lo end
    as prefix, count(*) as stores from events where event_type = 'store'
    group by all having prefix is not null order by stores desc, prefix limit 5"""
)
print("prefix", "stores", sep="\t")
for row in busiest.fetchall():
    print(*row, sep="\t")
