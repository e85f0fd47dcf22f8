// The unit of work: one contiguous copy between a local and a remote region.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

/// One contiguous copy. Offsets are bytes from the start of the two regions; length is in bytes
/// and may be 0 or exceed 4 GiB.
struct Slice {
  std::uint64_t local_offset = 0;
  std::uint64_t remote_offset = 0;
  std::uint64_t length = 0;

  friend bool operator==(const Slice&, const Slice&) = default;
};

/// True when [offset, offset + length) lies inside `size` bytes; safe against overflow.
constexpr bool fits(std::uint64_t offset, std::uint64_t length, std::uint64_t size) noexcept {
  return offset <= size && length <= size - offset;
}

/// A run of bytes inside an array of slices: `bytes` bytes that start `skip` bytes into *first and
/// go on through at most `count` slices; the last may be cut. Does not own the slices.
struct SliceRange {
  const Slice* first = nullptr;
  std::uint32_t count = 0;
  std::uint64_t skip = 0;
  std::uint64_t bytes = 0;

  /// Calls visit(local_offset, remote_offset, length) for every piece, none empty.
  template <class Visit>
  void for_each(Visit&& visit) const {
    std::uint64_t left = bytes;
    std::uint64_t offset = skip;
    for (std::uint32_t i = 0; i < count && left > 0; ++i) {
      const std::uint64_t piece = std::min<std::uint64_t>(first[i].length - offset, left);
      if (piece > 0) visit(first[i].local_offset + offset, first[i].remote_offset + offset, piece);
      left -= piece;
      offset = 0;
    }
  }

  friend bool operator==(const SliceRange&, const SliceRange&) = default;
};

/// Cuts the front off `range`: at most `max_bytes` bytes in at most `max_pieces` pieces that are not empty.
/// The result is empty only when the range is, or a limit is 0.
SliceRange take_front(SliceRange& range, std::uint32_t max_pieces, std::uint64_t max_bytes) noexcept;

/// Walks an array of slices and cuts it into ranges for the transports.
class SliceCursor {
 public:
  SliceCursor() = default;
  explicit SliceCursor(std::span<const Slice> slices) : slices_(slices) {}

  bool at_end() const noexcept { return index_ == slices_.size(); }

  /// The next range of at most `max_bytes` bytes and `max_slices` slices; slices of up to
  /// `whole_bytes` are never cut in two unless alone larger than max_bytes. Limits of 0 count as 1;
  /// at the end the range is empty.
  SliceRange next(std::uint64_t max_bytes, std::uint32_t max_slices, std::uint64_t whole_bytes);

 private:
  std::span<const Slice> slices_;
  std::size_t index_ = 0;
  std::uint64_t offset_ = 0;
};

/// Copies `from` to `to` (room for from.size()), leaving out empty slices and joining neighbours
/// that touch on both sides. Returns how many remain. `from` and `to` may be the same array.
/// Allocates nothing; offsets and lengths may be anything, bounds are not checked here.
std::size_t merge_slices(std::span<const Slice> from, Slice* to) noexcept;

}  // namespace kvferry
