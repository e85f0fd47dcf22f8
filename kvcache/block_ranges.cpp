#include <algorithm>

#include <fmt/format.h>

#include <kvferry/kvcache/block_ranges.hpp>

namespace kvferry {
namespace {

/// One dimension that is used whole.
struct Loop {
  std::uint64_t stride = 0;
  std::uint64_t count = 0;
};

Status check(const Layout& layout, std::span<const BlockId> blocks, IndexRange layers, Payload payload) {
  const LayoutSpec& spec = layout.spec();
  if (payload == Payload::scales && !spec.scales)
    return {Errc::invalid_argument, "block ranges: scales are asked for, and the layout has none"};
  if (layers.end < layers.first)
    return {Errc::invalid_argument,
            fmt::format("block ranges: layers {} to {}: the range ends before it begins", layers.first, layers.end)};
  if (layers.end > spec.layers)
    return {Errc::out_of_bounds,
            fmt::format("block ranges: layers up to {}, the layout has {}", layers.end, spec.layers)};
  for (const BlockId block : blocks)
    if (block >= spec.blocks)
      return {Errc::out_of_bounds, fmt::format("block ranges: block {}, the layout has {}", block, spec.blocks)};
  return {};
}

/// Every offset that the loops lead to from `offset`, with `length` bytes there.
void visit(std::span<const Loop> loops, std::uint64_t offset, std::uint64_t length, std::vector<ByteRange>& ranges) {
  if (loops.empty()) {
    ranges.push_back({offset, length});
    return;
  }
  for (std::uint64_t i = 0; i < loops.front().count; ++i)
    visit(loops.subspan(1), offset + i * loops.front().stride, length, ranges);
}

}  // namespace

Result<std::vector<ByteRange>> block_ranges(const Layout& layout, std::span<const BlockId> blocks, IndexRange layers,
                                            Payload payload) {
  if (Status status = check(layout, blocks, layers, payload); !status) return status;
  const LayoutSpec& spec = layout.spec();
  const Placement& place = payload == Payload::scales ? spec.scales->placement : spec.values;
  std::vector<Loop> loops;
  for (const Dim dim : {Dim::part, Dim::token, Dim::head})
    if (layout.size(dim) > 1) loops.push_back({place.strides.of(dim), layout.size(dim)});
  if (layers.count() > 1) loops.push_back({place.strides.layer, layers.count()});
  std::sort(loops.begin(), loops.end(), [](const Loop& a, const Loop& b) { return a.stride > b.stride; });
  // What lies densely from the innermost dimension outwards is one run.
  std::uint64_t run = payload == Payload::scales ? dtype_bytes(spec.scales->dtype) : layout.head_bytes();
  while (!loops.empty() && loops.back().stride == run) {
    run *= loops.back().count;
    loops.pop_back();
  }
  std::vector<ByteRange> ranges;
  if (layers.count() == 0) return ranges;
  const std::uint64_t first = place.offset + (spec.layers > 1 ? layers.first * place.strides.layer : 0);
  for (const BlockId block : blocks)
    visit(loops, first + (spec.blocks > 1 ? block * place.strides.block : 0), run, ranges);
  return ranges;
}

}  // namespace kvferry
