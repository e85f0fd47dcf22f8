#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include <kvferry/runtime/range_set.hpp>

namespace kvferry {
namespace {

constexpr std::size_t encoded_bytes = 16;

void put(std::string& to, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) to.push_back(static_cast<char>(value >> (8 * i)));
}

std::uint64_t get(const std::byte* from) noexcept {
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= std::to_integer<std::uint64_t>(from[i]) << (8 * i);
  return value;
}

bool holds(const ByteRange& range, std::uint64_t offset, std::uint64_t length) noexcept {
  return offset >= range.offset && offset - range.offset <= range.length &&
         length <= range.length - (offset - range.offset);
}

}  // namespace

RangeSet::RangeSet(std::vector<ByteRange> ranges) : ranges_(std::move(ranges)) {
  std::erase_if(ranges_, [](const ByteRange& range) { return range.length == 0; });
  std::sort(ranges_.begin(), ranges_.end(), [](const ByteRange& a, const ByteRange& b) { return a.offset < b.offset; });
  std::size_t kept = 0;
  for (const ByteRange& range : ranges_) {
    ByteRange* last = kept > 0 ? &ranges_[kept - 1] : nullptr;
    if (last != nullptr && range.offset <= last->offset + last->length)
      last->length = std::max(last->length, range.offset + range.length - last->offset);
    else
      ranges_[kept++] = range;
  }
  ranges_.resize(kept);
  ranges_.shrink_to_fit();
}

bool RangeSet::covers(std::uint64_t offset, std::uint64_t length, std::size_t& hint) const noexcept {
  if (length == 0) return true;
  for (std::size_t near = hint; near < ranges_.size() && near < hint + 2; ++near) {
    if (!holds(ranges_[near], offset, length)) continue;
    hint = near;
    return true;
  }
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), offset,
                       [](std::uint64_t wanted, const ByteRange& range) { return wanted < range.offset; });
  if (after == ranges_.begin()) return false;
  hint = static_cast<std::size_t>(after - ranges_.begin()) - 1;
  return holds(ranges_[hint], offset, length);
}

std::string RangeSet::encode(std::size_t first, std::size_t count) const {
  std::string bytes;
  const std::size_t last = std::min(ranges_.size(), first + count);
  bytes.reserve((last - std::min(first, last)) * encoded_bytes);
  for (std::size_t i = first; i < last; ++i) {
    put(bytes, ranges_[i].offset);
    put(bytes, ranges_[i].length);
  }
  return bytes;
}

Status RangeSet::decode(std::span<const std::byte> bytes, std::vector<ByteRange>& ranges) {
  if (bytes.size() % encoded_bytes != 0)
    return {Errc::malformed, fmt::format("{} bytes are no whole number of ranges", bytes.size())};
  for (std::size_t at = 0; at < bytes.size(); at += encoded_bytes) {
    const ByteRange range{get(bytes.data() + at), get(bytes.data() + at + 8)};
    if (range.length > std::numeric_limits<std::uint64_t>::max() - range.offset)
      return {Errc::malformed,
              fmt::format("a range of {} bytes at {} ends beyond 64 bits", range.length, range.offset)};
    ranges.push_back(range);
  }
  return {};
}

}  // namespace kvferry
