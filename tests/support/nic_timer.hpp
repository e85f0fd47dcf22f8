// When a simulated device is done with a request: bandwidth, rate of operations, latency, and the reads that a
// queue pair may have outstanding, under a clock that the test moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace kvferry::test {

/// What every device of a simulation can do.
struct NicSpeed {
  std::uint64_t gbit = 400;                ///< of payload per direction, Gb/s
  std::uint64_t operations = 7'000'000;    ///< requests a second
  std::uint64_t round_trip_ns = 2000;      ///< between the last byte of a request and its completion
  std::uint64_t retry_ns = 4096ull << 14;  ///< until a packet without answer is repeated, as verbs.timeout
  std::uint64_t tries = 7;                 ///< until the pair gives up: one and verbs.retries
};

/// Queue pairs take turns on their device, one request at a time. One thread, or under its owner's lock.
class NicTimer {
 public:
  using Picoseconds = std::uint64_t;

  NicTimer(const NicSpeed& speed, std::size_t devices);

  /// A request is handed to the device. `peer` is the device that it goes to, `reads_out` the most reads of this
  /// pair that may be outstanding.
  void post(std::uint32_t pair, std::size_t device, std::size_t peer, std::uint64_t bytes, bool read,
            std::uint32_t reads_out);
  void forget(std::uint32_t pair);
  void advance(Picoseconds by);
  Picoseconds now() const noexcept { return now_; }

  /// Whether the pair's oldest request has come back by now.
  bool front_is_due(std::uint32_t pair) const;
  void pop(std::uint32_t pair);
  /// Whether a pair that gets no answer has repeated its packets often enough; the first question starts the wait.
  bool gives_up(std::uint32_t pair);

 private:
  struct Waiting {
    Picoseconds posted = 0;
    std::size_t peer = 0;
    std::uint64_t bytes = 0;
    bool read = false;
    std::uint32_t reads_out = 1;
  };
  struct Pair {
    std::size_t device = 0;
    std::deque<Waiting> waiting;
    std::deque<Picoseconds> due;    ///< of what is under way
    std::deque<Picoseconds> reads;  ///< ends of the last reads, as many as may be outstanding
    std::uint64_t last_turn = 0;
    std::optional<Picoseconds> unanswered_since;
  };
  struct Device {
    Picoseconds operation_free = 0;
    Picoseconds out_free = 0;  ///< the direction from the device
    Picoseconds in_free = 0;
    std::vector<Pair*> pairs;
  };

  /// When the pair's next request can start.
  Picoseconds start_of(const Pair& pair) const;
  Pair* next_to_start(const Device& device, Picoseconds& at) const;
  void start(Device& device, Pair& pair, Picoseconds at);

  const NicSpeed speed_;
  std::vector<Device> devices_;
  std::map<std::uint32_t, Pair> pairs_;
  Picoseconds now_ = 0;
  std::uint64_t turn_ = 0;
};

}  // namespace kvferry::test
