"""How times and copies are counted."""

import jax.numpy as jnp
import pytest

from pallas_kernels import timing


class FakeDevice:
  """A device whose calls take as long as told, and its clock."""

  def __init__(self, seconds, wait_seconds=0.0):
    self.seconds, self.wait_seconds = list(seconds), wait_seconds
    self.now, self.calls, self.waits = 0.0, 0, 0

  def call(self):
    self.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
    self.calls += 1

  def wait(self, _):
    self.now += self.wait_seconds
    self.waits += 1

  def clock(self):
    return self.now


def test_a_sample_is_a_batch_long_enough_and_awaited_once():
  device = FakeDevice([0.0005], wait_seconds=0.0001)
  found = timing.measure(
    device.call,
    wait=device.wait,
    clock=device.clock,
    samples=20,
    sample_seconds=0.01,
  )
  assert found.samples == 20
  assert found.calls * 0.0005 == pytest.approx(0.01, rel=0.1)
  assert device.waits == 20 + 3  # three batches of warming up
  assert found.median_us == pytest.approx(500 + 100 / found.calls)
  assert found.rate(1e6) == pytest.approx(1e6 / found.median_us / 1e3)


def test_slow_first_calls_do_not_count():
  device = FakeDevice([10.0, 1.0, 0.002])
  found = timing.measure(device.call, wait=device.wait, clock=device.clock)
  assert found.low_us == pytest.approx(2000)
  assert found.high_us == pytest.approx(2000)


def test_quartiles_hold_the_spread():
  device = FakeDevice([1.0] * 6 + [1.0, 2.0, 3.0, 4.0, 5.0])
  found = timing.measure(
    device.call, wait=device.wait, clock=device.clock, samples=5
  )
  assert found.calls == 1
  seconds = (found.low_us / 1e6, found.median_us / 1e6, found.high_us / 1e6)
  assert seconds == pytest.approx((2, 3, 4))


def test_calls_take_turns():
  device, order = FakeDevice([0.002]), []

  def named(name):
    def call():
      order.append(name)
      device.call()

    return call

  found = timing.measure_in_turn(
    [named("a"), named("b")],
    wait=device.wait,
    clock=device.clock,
    samples=3,
    sample_seconds=0.002,
  )
  assert [timed.calls for timed in found] == [1, 1]
  assert order[-6:] == ["a", "b"] * 3
  assert [timed.median_us for timed in found] == pytest.approx([2000, 2000])


def test_one_sample_is_refused():
  with pytest.raises(ValueError, match="samples must be at least 2; got 1"):
    timing.measure(lambda: None, samples=1)


def test_small_arguments_take_turns(monkeypatch):
  monkeypatch.setattr(timing, "CACHE_BYTES", 4096)
  seen = []
  call = timing.rotation(seen.append, (jnp.zeros(256, jnp.float32),))
  for _ in range(8):
    call()
  assert len({id(x) for x in seen}) == 4
  assert seen[0] is seen[4]


def test_large_arguments_are_not_copied(monkeypatch):
  monkeypatch.setattr(timing, "CACHE_BYTES", 1024)
  x, seen = jnp.zeros(256, jnp.float32), []
  call = timing.rotation(seen.append, (x,))
  call()
  call()
  assert seen[0] is x
  assert seen[1] is x


def test_copies_are_timed_and_the_fastest_wins():
  found = timing.copies(2**16, bulk=False, samples=2, sample_seconds=1e-4)
  assert set(found) == {"XLA copy", "XLA elementwise"}
  slow = timing.Timing(median_us=10, low_us=10, high_us=10, samples=2, calls=1)
  fast = timing.Timing(median_us=5, low_us=5, high_us=5, samples=2, calls=1)
  copy = timing.fastest([{"a": slow, "b": slow}, {"b": fast}], size=1000)
  assert copy.how == "b"
  assert copy.gigabytes_per_second == pytest.approx(2000 / 5e-6 / 1e9)
  assert copy.all == pytest.approx({"a": 0.2, "b": 0.4})
