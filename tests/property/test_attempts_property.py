"""Failed attempts: never more answered than the allowance says, by whoever, and bounded in memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from advisor.access.attempts import ADDRESSES_MAX, Allowance, Attempts, network_of

ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:1::1", "::ffff:10.0.0.1"])


@given(st.lists(st.tuples(ADDRESSES, st.floats(-5, 60)), max_size=60))
def test_no_more_is_answered_than_the_allowances_say(failures: list[tuple[str, float]]) -> None:
    each, in_all = Allowance(burst=3, per_s=0.5), Allowance(burst=5, per_s=1)
    attempts = Attempts(each, in_all)
    now_s = highest_s = 0.0
    answered: list[str] = []
    for address, passed_s in failures:
        now_s += passed_s
        highest_s = max(now_s, highest_s)
        wait_s = attempts.failed(address, now_s)
        assert 0 <= wait_s <= 1 / each.per_s
        if wait_s == 0:
            answered.append(network_of(address))
    span_s = highest_s
    assert len(answered) <= in_all.burst + in_all.per_s * span_s + 1e-6
    for network in set(answered):
        assert answered.count(network) <= each.burst + each.per_s * span_s + 1e-6


@given(st.integers(0, 50))
def test_who_waits_as_told_is_answered_again(failures: int) -> None:
    attempts = Attempts()
    wait_s = 0.0
    for _ in range(10 + failures):
        wait_s = attempts.failed("10.0.0.1", 0.0)
    assert (wait_s == 0.0) == (failures == 0)
    assert attempts.failed("10.0.0.1", wait_s or 5.0) == 0.0


def test_addresses_are_kept_up_to_a_bound_and_the_busy_one_is_not_forgotten() -> None:
    attempts = Attempts(in_all=Allowance(burst=1e9, per_s=1))
    for number in range(ADDRESSES_MAX + 500):
        attempts.failed("10.255.0.1", 0.0)
        attempts.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert len(attempts) == ADDRESSES_MAX
    assert attempts.failed("10.255.0.1", 0.0) > 0


def test_whose_an_address_is() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("") == ""
    assert len(network_of("x" * 5_000)) == 64
