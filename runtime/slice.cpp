#include <algorithm>
#include <limits>

#include <kvferry/runtime/slice.hpp>

namespace kvferry {

namespace {

// A sum of lengths that wrapped would turn two slices that leave their region into one that seems
// to lie inside it, so such slices stay apart and fail their bounds check each for itself.
bool touches(const Slice& before, const Slice& after) noexcept {
  return before.local_offset + before.length == after.local_offset &&
         before.remote_offset + before.length == after.remote_offset &&
         after.length <= std::numeric_limits<std::uint64_t>::max() - before.length;
}

}  // namespace

SliceRange take_front(SliceRange& range, std::uint32_t max_pieces, std::uint64_t max_bytes) noexcept {
  SliceRange front{range.first, 0, range.skip, 0};
  for (std::uint32_t pieces = 0; pieces < max_pieces && front.bytes < max_bytes && range.bytes > 0;) {
    if (range.count == 0) break;
    const std::uint64_t rest = range.first->length - range.skip;
    const std::uint64_t piece = std::min({rest, range.bytes, max_bytes - front.bytes});
    if (piece > 0) ++pieces;
    ++front.count;
    front.bytes += piece;
    range.bytes -= piece;
    range.skip += piece;
    if (piece < rest) break;
    ++range.first;
    --range.count;
    range.skip = 0;
  }
  return front;
}

SliceRange SliceCursor::next(std::uint64_t max_bytes, std::uint32_t max_slices, std::uint64_t whole_bytes) {
  if (at_end()) return {};
  max_bytes = std::max<std::uint64_t>(max_bytes, 1);
  max_slices = std::max<std::uint32_t>(max_slices, 1);

  SliceRange range{&slices_[index_], 0, offset_, 0};
  while (index_ < slices_.size() && range.count < max_slices && range.bytes < max_bytes) {
    const Slice& slice = slices_[index_];
    const std::uint64_t rest = slice.length - offset_;
    const std::uint64_t room = max_bytes - range.bytes;
    if (rest > room) {
      if (range.count > 0 && slice.length <= whole_bytes) break;
      range.bytes += room;
      ++range.count;
      offset_ += room;
      break;
    }
    range.bytes += rest;
    ++range.count;
    ++index_;
    offset_ = 0;
  }
  return range;
}

std::size_t merge_slices(std::span<const Slice> from, Slice* to) noexcept {
  std::size_t next = 0;
  while (next < from.size() && from[next].length == 0) ++next;
  if (next == from.size()) return 0;

  // The slice that still grows stays in registers and is stored once; it never overtakes the one
  // that is read, which is what makes merging in place right.
  std::size_t count = 0;
  Slice growing = from[next++];
  for (; next < from.size(); ++next) {
    const Slice slice = from[next];
    if (slice.length == 0) continue;
    if (touches(growing, slice)) {
      growing.length += slice.length;
    } else {
      to[count++] = growing;
      growing = slice;
    }
  }
  to[count++] = growing;
  return count;
}

}  // namespace kvferry
