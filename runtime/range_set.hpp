// A set of bytes of a region, as the ranges that make it up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// Bytes [offset, offset + length) of a region.
struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;

  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

/// Ranges in ascending order that neither overlap nor touch. Immutable, so any thread may ask.
class RangeSet {
 public:
  RangeSet() = default;
  /// Ranges in any order; overlapping and touching ones are joined, empty ones left out. No range may end
  /// beyond 64 bits.
  explicit RangeSet(std::vector<ByteRange> ranges);

  std::span<const ByteRange> ranges() const noexcept { return ranges_; }
  /// One more than the last byte; 0 for an empty set.
  std::uint64_t end() const noexcept { return ranges_.empty() ? 0 : ranges_.back().offset + ranges_.back().length; }

  /// Whether all of [offset, offset + length) is in the set; a length of 0 always is. `hint` (0 at first) is where
  /// the last answer was found: neighbouring questions cost no search.
  bool covers(std::uint64_t offset, std::uint64_t length, std::size_t& hint) const noexcept;
  bool covers(std::uint64_t offset, std::uint64_t length) const noexcept {
    std::size_t hint = 0;
    return covers(offset, length, hint);
  }

  /// The ranges from number `first` on, at most `count`, as 16 bytes each: offset and length, little-endian.
  std::string encode(std::size_t first, std::size_t count) const;
  /// Appends what encode() wrote. Error: malformed (no whole number of ranges, or one that ends beyond 64 bits).
  static Status decode(std::span<const std::byte> bytes, std::vector<ByteRange>& ranges);

 private:
  std::vector<ByteRange> ranges_;
};

}  // namespace kvferry
