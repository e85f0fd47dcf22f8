#include <algorithm>

// Inline, so that kvferry needs xxHash to be built but not to be linked or shipped.
#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <kvferry/kvcache/block_checksum.hpp>
#include <kvferry/runtime/one_sided.hpp>

namespace kvferry {
namespace {

Status check(const ChecksumRequest& request, std::uint32_t layer, std::span<const std::byte> region) {
  const PlanSide& side = request.side;
  if (side.layout == nullptr || side.rank >= side.layout->spec().tp_size || request.unit_tokens == 0 ||
      request.tokens.end < request.tokens.first)
    return {Errc::invalid_argument,
            "checksums: they need a layout, a rank of it, a unit of at least one token and tokens in ascending order"};
  const LayoutSpec& spec = side.layout->spec();
  if (request.payload == Payload::scales && !spec.scales)
    return {Errc::invalid_argument, "checksums: scales are asked for, and the layout has none"};
  const HeadRange held = side.layout->heads_of(side.rank);
  if (request.heads.first < held.first || request.heads.end() > held.end() || layer >= spec.layers)
    return {
        Errc::out_of_bounds,
        fmt::format("checksums: heads {} to {} of layer {}: rank {} holds heads {} to {} of {} layers",
                    request.heads.first, request.heads.end(), layer, side.rank, held.first, held.end(), spec.layers)};
  const std::uint64_t blocks_needed = (std::uint64_t{request.tokens.end} + spec.block_tokens - 1) / spec.block_tokens;
  if (request.tokens.count() > 0 && side.blocks.size() < blocks_needed)
    return {Errc::out_of_bounds, fmt::format("checksums: {} tokens need {} blocks, the table has {}",
                                             request.tokens.end, blocks_needed, side.blocks.size())};
  for (const BlockId block : side.blocks)
    if (block >= spec.blocks)
      return {Errc::out_of_bounds, fmt::format("checksums: block {}, the layout has {}", block, spec.blocks)};
  const Placement& place = request.payload == Payload::scales ? spec.scales->placement : spec.values;
  if (region.size() < place.region_bytes)
    return {Errc::out_of_bounds,
            fmt::format("checksums: a region of {} bytes, the layout needs {}", region.size(), place.region_bytes)};
  return {};
}

/// Hashes one unit after the other.
class Hasher {
 public:
  Hasher(const ChecksumRequest& request, std::uint32_t layer, std::span<const std::byte> region)
      : request_(request), layout_(*request.side.layout), layer_(layer), region_(region) {
    const LayoutSpec& spec = layout_.spec();
    const bool scales = request.payload == Payload::scales;
    const Strides& strides = scales ? spec.scales->placement.strides : spec.values.strides;
    element_ = scales ? dtype_bytes(spec.scales->dtype) : layout_.head_bytes();
    first_head_ = request.heads.first - layout_.heads_of(request.side.rank).first;
    heads_touch_ = request.heads.count == 1 || strides.head == element_;
    tokens_touch_ = heads_touch_ && strides.token == element_ * request.heads.count;
  }

  std::uint64_t unit(std::uint32_t number, IndexRange tokens) {
    XXH3_64bits_reset_withSeed(&state_, std::uint64_t{layer_} << 32 | number);
    for (std::uint32_t part = 0; part < layout_.parts(); ++part) add_part(static_cast<Part>(part), tokens);
    return XXH3_64bits_digest(&state_);
  }

 private:
  void add_part(Part part, IndexRange tokens) {
    const std::uint32_t block_tokens = layout_.spec().block_tokens;
    for (std::uint32_t token = tokens.first; token < tokens.end;) {
      const std::uint32_t in_block = token % block_tokens;
      const std::uint32_t run = std::min(tokens.end - token, block_tokens - in_block);
      add_tokens(part, request_.side.blocks[token / block_tokens], in_block, run);
      token += run;
    }
  }
  void add_tokens(Part part, BlockId block, std::uint32_t first, std::uint32_t count) {
    const std::uint64_t bytes = element_ * request_.heads.count;
    if (tokens_touch_) return add(part, block, first, first_head_, bytes * count);
    for (std::uint32_t token = first; token < first + count; ++token) {
      if (heads_touch_) {
        add(part, block, token, first_head_, bytes);
        continue;
      }
      for (std::uint32_t head = 0; head < request_.heads.count; ++head)
        add(part, block, token, first_head_ + head, element_);
    }
  }
  void add(Part part, BlockId block, std::uint32_t token, std::uint32_t head, std::uint64_t bytes) {
    const std::uint64_t place = request_.payload == Payload::scales
                                    ? layout_.scale_address(layer_, part, block, token, head)
                                    : layout_.address(layer_, part, block, token, head);
    XXH3_64bits_update(&state_, region_.data() + place, bytes);
  }

  const ChecksumRequest& request_;
  const Layout& layout_;
  const std::uint32_t layer_;
  const std::span<const std::byte> region_;
  std::uint64_t element_ = 0;
  std::uint32_t first_head_ = 0;
  bool heads_touch_ = false;
  bool tokens_touch_ = false;
  XXH3_state_t state_;
};

}  // namespace

Result<std::vector<std::uint64_t>> block_checksums(const ChecksumRequest& request, std::uint32_t layer,
                                                   std::span<const std::byte> region) {
  if (Status status = check(request, layer, region); !status) return status;
  std::vector<std::uint64_t> sums;
  if (request.tokens.count() == 0) return sums;
  const OneSidedAccess unordered;
  Hasher hasher(request, layer, region);
  const std::uint32_t first = request.tokens.first / request.unit_tokens;
  const std::uint32_t last = (request.tokens.end - 1) / request.unit_tokens;
  sums.reserve(last - first + 1);
  for (std::uint32_t unit = first; unit <= last; ++unit) {
    const std::uint64_t begin = std::uint64_t{unit} * request.unit_tokens;
    const std::uint64_t end = begin + request.unit_tokens;
    sums.push_back(hasher.unit(unit, {static_cast<std::uint32_t>(std::max<std::uint64_t>(begin, request.tokens.first)),
                                      static_cast<std::uint32_t>(std::min<std::uint64_t>(end, request.tokens.end))}));
  }
  return sums;
}

}  // namespace kvferry
