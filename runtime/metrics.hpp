// Counters and latency histograms of an engine.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <string>

namespace kvferry {

/// Latencies in nanoseconds, in buckets of at most 1/16 relative width (log-linear, as in Gil Tene's
/// HdrHistogram). record() is wait-free and callable from any thread.
class LatencyHistogram {
 public:
  void record(std::uint64_t nanoseconds) noexcept {
    buckets_[bucket_of(nanoseconds)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(nanoseconds, std::memory_order_relaxed);
  }
  std::uint64_t count() const noexcept;
  double mean_ns() const noexcept;
  /// The value below which `fraction` (0-1) of the records lie; 0 when there are none.
  std::uint64_t percentile_ns(double fraction) const noexcept;

 private:
  static constexpr unsigned sub_bits = 4;
  static constexpr std::size_t bucket_count = (64 - sub_bits + 1) << sub_bits;

  static constexpr std::size_t bucket_of(std::uint64_t value) noexcept {
    if (value < (1u << sub_bits)) return value;
    const unsigned shift = std::bit_width(value) - sub_bits - 1;
    return (static_cast<std::size_t>(shift + 1) << sub_bits) + ((value >> shift) & ((1u << sub_bits) - 1));
  }
  static constexpr std::uint64_t upper_bound_of(std::size_t bucket) noexcept {
    if (bucket < (1u << sub_bits)) return bucket;
    const unsigned shift = static_cast<unsigned>(bucket >> sub_bits) - 1;
    const std::uint64_t mantissa = (1u << sub_bits) + (bucket & ((1u << sub_bits) - 1));
    return ((mantissa + 1) << shift) - 1;
  }

  std::array<std::atomic<std::uint64_t>, bucket_count> buckets_{};
  std::atomic<std::uint64_t> sum_{0};
};

/// The living counters, one set per engine; any thread may raise them.
struct MetricCounters {
  // What callers raise and what pollers raise lies on lines of its own: otherwise every transfer would
  // carry the line from one core to the other and back.
  alignas(64) std::atomic<std::uint64_t> transfers_started{0};
  std::atomic<std::uint64_t> slices{0};
  alignas(64) std::atomic<std::uint64_t> transfers_ok{0};
  std::atomic<std::uint64_t> transfers_failed{0};
  std::atomic<std::uint64_t> bytes_read{0};
  std::atomic<std::uint64_t> bytes_written{0};
  std::atomic<std::uint64_t> items_posted{0};
  std::atomic<std::uint64_t> items_retried{0};
  std::atomic<std::uint64_t> channels_opened{0};
  std::atomic<std::uint64_t> channels_lost{0};
  std::atomic<std::uint64_t> fences{0};
  std::atomic<std::uint64_t> notifications{0};
  std::atomic<std::uint64_t> messages{0};
  alignas(64) std::atomic<std::uint64_t> handshakes_refused{0};
  std::atomic<std::uint64_t> malformed_messages{0};
  LatencyHistogram latency;  ///< submission to end, transfers that ended ok
};

/// A copy of the counters at one moment.
struct Metrics {
  std::map<std::string, std::uint64_t> counters;  ///< name → value
  std::uint64_t latency_count = 0;                ///< transfers whose latency was recorded
  double latency_mean_us = 0;
  double latency_p50_us = 0;
  double latency_p99_us = 0;

  static Metrics of(const MetricCounters& counters);
  /// Prometheus text exposition format, names prefixed with kvferry_.
  std::string to_prometheus() const;
};

}  // namespace kvferry
