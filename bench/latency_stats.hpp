// Trip times of one case.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace kvferry::bench {

/// Counts trip times in buckets of at most 1/512 relative width, so that a ratio of two medians is
/// good to 0.4 % and millions of trips need no more memory than one. Allocates only at the start.
class LatencyStats {
 public:
  LatencyStats() : buckets_((64 - sub_bits + 1) << sub_bits) {}

  void record(std::uint64_t nanoseconds) noexcept {
    ++buckets_[bucket_of(nanoseconds)];
    ++count_;
    sum_ += nanoseconds;
    max_ = std::max(max_, nanoseconds);
  }

  std::uint64_t count() const noexcept { return count_; }
  double sum_seconds() const noexcept { return static_cast<double>(sum_) / 1e9; }
  double max_us() const noexcept { return static_cast<double>(max_) / 1e3; }
  double average_us() const noexcept {
    return count_ == 0 ? 0 : static_cast<double>(sum_) / static_cast<double>(count_) / 1e3;
  }

  /// The time that `fraction` (0 to 1) of the trips stayed within; 0 without trips.
  double quantile_us(double fraction) const noexcept {
    if (count_ == 0) return 0;
    const double rank = fraction * static_cast<double>(count_ - 1);
    std::uint64_t seen = 0;
    for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      seen += buckets_[bucket];
      if (static_cast<double>(seen) > rank) return std::min(middle_of(bucket) / 1e3, max_us());
    }
    return max_us();
  }

 private:
  static constexpr unsigned sub_bits = 9;

  static std::size_t bucket_of(std::uint64_t value) noexcept {
    if (value < (1u << sub_bits)) return value;
    const unsigned shift = static_cast<unsigned>(std::bit_width(value)) - sub_bits - 1;
    return (std::size_t{shift + 1} << sub_bits) + ((value >> shift) & ((1u << sub_bits) - 1));
  }

  static double middle_of(std::size_t bucket) noexcept {
    if (bucket < (1u << sub_bits)) return static_cast<double>(bucket);
    const unsigned shift = static_cast<unsigned>(bucket >> sub_bits) - 1;
    const double mantissa = static_cast<double>((1u << sub_bits) + (bucket & ((1u << sub_bits) - 1)));
    return (mantissa + 0.5) * static_cast<double>(std::uint64_t{1} << shift) - 0.5;
  }

  std::vector<std::uint64_t> buckets_;
  std::uint64_t count_ = 0;
  std::uint64_t sum_ = 0;
  std::uint64_t max_ = 0;
};

}  // namespace kvferry::bench
